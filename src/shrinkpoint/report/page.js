"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const tip = document.getElementById("tip");
  const tips = JSON.parse(document.getElementById("tips").textContent);

  const setTheme = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to " + (theme === "dark" ? "light" : "dark") + " colors");
  };
  button.addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  const show = (text, x, y) => {
    tip.hidden = !text;
    tip.textContent = text;
    if (!text) return;
    const {offsetWidth: width, offsetHeight: height} = tip;
    tip.style.left = Math.max(4, Math.min(x + 12, root.clientWidth - width - 4)) + "px";
    tip.style.top = (y + height + 16 > innerHeight ? Math.max(4, y - height - 12) : y + 12) + "px";
  };

  // A mark is a line without length in units of the chart's sides, "M120 345h0".
  const nearestMark = (svg, x, y) => {
    const area = svg.getBoundingClientRect();
    let best = {distance: 40};
    for (const path of svg.querySelectorAll("path[data-rows]")) {
      const rows = path.dataset.rows.split(" ");
      [...path.getAttribute("d").matchAll(/M(\S+) (\S+?)h0/g)].forEach((match, index) => {
        const text = (tips[path.dataset.run] || [])[rows[index]];
        const left = area.left + area.width * match[1] / 1000, top = area.top + area.height * match[2] / 1000;
        const distance = Math.hypot(left - x, top - y);
        if (text && distance < best.distance) best = {distance, text, left, top};
      });
    }
    return best;
  };

  const point = (event) => {
    const box = event.target.closest && event.target.closest("[data-tip]");
    const chart = event.target.closest && event.target.closest(".chart");
    if (box) return show(box.dataset.tip, event.clientX, event.clientY);
    const mark = chart ? nearestMark(chart.querySelector("svg"), event.clientX, event.clientY) : {};
    show(mark.text || "", mark.left, mark.top);
  };
  for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, point);
  document.addEventListener("scroll", () => show(""), {passive: true});
})();
