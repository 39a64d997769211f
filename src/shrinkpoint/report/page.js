"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = figures.map((_, index) => document.getElementById("plot-" + index));
  const themeButton = document.getElementById("theme");
  const config = {responsive: true, displaylogo: false, displayModeBar: false};

  // Plotly draws colors as they are given, so those of the page are read from its style.
  const colors = () => {
    const style = getComputedStyle(document.body);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = {gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line")};
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: {color: color("--ink"), family: style.fontFamily || "sans-serif"},
      hoverlabel: {bgcolor: color("--raised"), bordercolor: color("--line"), font: {color: color("--ink")}},
      axis,
    };
  };

  const themed = (layout) => {
    const {axis, ...shared} = colors();
    const out = {...layout, ...shared};
    for (const name of ["xaxis", "yaxis"]) if (layout[name]) out[name] = {...layout[name], ...axis};
    return out;
  };

  const setTheme = (theme) => {
    root.dataset.theme = theme;
    themeButton.textContent = theme === "dark" ? "Light" : "Dark";
    themeButton.setAttribute("aria-label", "Switch to " + (theme === "dark" ? "light" : "dark") + " colors");
  };

  const draw = (index) => {
    const {data, layout} = figures[index];
    return Plotly.react(plots[index], data, themed(layout), config);
  };

  themeButton.addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    figures.forEach((_, index) => draw(index));
  });

  for (const button of document.querySelectorAll("button[data-switch]")) {
    button.addEventListener("click", () => {
      const figure = figures[Number(button.dataset.figure)];
      figure.data[0] = {...figure.data[0], values: figure.switches[Number(button.dataset.switch)]};
      for (const other of document.querySelectorAll(`button[data-figure="${button.dataset.figure}"]`))
        other.setAttribute("aria-pressed", String(other === button));
      draw(Number(button.dataset.figure));
    });
  }

  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  Promise.all(figures.map((_, index) => draw(index))).then(() => root.setAttribute("data-drawn", String(figures.length)));
})();
