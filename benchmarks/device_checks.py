"""Parts of `device_all.py` that say whether all is right: the machine, the tests, compute-sanitizer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from device_job import Job

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "safetensors", "triton", "transformers", "lightning", "nanobind", "scikit-build-core", "pytest")
QUERY = "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm"
KINDS = "PASSED|FAILED|SKIPPED|ERROR"
RESULT = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({KINDS}) |^tests/.* ({KINDS})\b.*\[ *\d+%\]$", re.MULTILINE)
FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/.*)$", re.MULTILINE)


def machine(job: Job) -> None:
    """Versions, the GPU as nvidia-smi sees it, memory and disk, and where the library comes from."""
    import shrinkpoint

    job.add(fact="shrinkpoint", value=f"{shrinkpoint.__version__}, {os.environ.get('DEVICE_LIBRARY', 'importable')}")
    job.add(fact="its folder", value=str(Path(shrinkpoint.__file__).parent))
    job.add(fact="python", value=f"{platform.python_version()}, {platform.machine()}")
    job.add(fact="torch", value=f"{torch.__version__}, CUDA {torch.version.cuda}, threads {torch.get_num_threads()}")
    job.add(fact="cores", value=len(os.sched_getaffinity(0)))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    job.add(fact="host memory, GB", value=pages / 1e9)
    for where in (job.folder, Path("/dev/shm")):
        with job.attempt(fact=f"free in {where.parts[1]}"):
            job.add(fact=f"free in /{where.parts[1]}, GB", value=shutil.disk_usage(where).free / 1e9)
    for package in PACKAGES:
        try:
            job.add(fact=package, value=version(package))
        except PackageNotFoundError:
            job.add(fact=package, note="not installed")
    if not job.is_cuda:
        job.add(fact="GPU", note="not run: on a CPU")
        return
    with job.attempt(fact="GPU"):
        properties = torch.cuda.get_device_properties(job.device)
        kind = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 1e9:.1f} GB"
        job.add(fact="GPU", value=kind)
        job.add(fact="cuDNN, nccl", value=f"{torch.backends.cudnn.version()}, {torch.cuda.nccl.version()}")
    with job.attempt(fact="nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        for name, value in zip(QUERY.split(","), done.stdout.strip().split(", "), strict=False):
            job.add(fact=name, value=value)
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout)


def gpu_test_files() -> list[str]:
    """Test files with tests marked gpu, their own or those of a contract."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    marked = re.compile(r"mark\.gpu|contracts\.(compressor|quantizer)")
    return [str(path.relative_to(ROOT)) for path, text in texts.items() if marked.search(text)]


def tests(job: Job) -> None:
    """All tests marked gpu in 8 processes, warnings as warnings: how many pass, and the last line of each failure."""
    files = gpu_test_files()
    processes = 8
    if job.is_quick:
        files, processes = [name for name in files if "side_streams" in name or "test_link" in name], 0
    job.add(tests="files", number=len(files))
    options = f"-v -rfE --tb=short -m gpu -n {processes} -p no:cacheprovider --continue-on-collection-errors"
    options += " -o filterwarnings= -W default --timeout 150"
    command = [sys.executable, "-m", "pytest", *files, *options.split(), "--junitxml", str(job.out / "junit.xml")]
    output = job.folder / "pytest.txt"
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "400"}
        )
        for seconds, ending in ((max(1.0, job.seconds_left - 12), signal.SIGINT), (8, signal.SIGKILL)):
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:  # after SIGINT pytest still writes its summary and junit.xml
                job.add(tests=f"after {seconds:.0f} s", note=f"not all were run: {ending.name}")
                process.send_signal(ending)
        process.wait()
    text = output.read_text(errors="replace")
    print(text)
    results = ["".join(groups) for groups in RESULT.findall(text)]
    for kind in KINDS.split("|"):
        job.add(tests=kind.lower(), number=results.count(kind))
    job.add(tests="seconds", number=time.monotonic() - began)
    for name in dict.fromkeys(FAILURE.findall(text)):
        test, _, reason = name.partition(" - ")
        job.add(tests=test, error=reason[:300] or "failed")
    if not results or process.returncode not in (0, 1, 2, -signal.SIGINT, -signal.SIGKILL):  # else there are rows
        last = [line for line in text.splitlines() if line.strip()][-1:]
        job.add(tests="pytest", error=f"ended with {process.returncode}: {''.join(last)[:300]}")


def save_on_side_streams(device: str, folder: str) -> None:
    """Two small saves in the background, a keyframe and a delta, while the loop changes the state."""
    import warnings

    import shrinkpoint as sp

    warnings.simplefilter("ignore")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for scheme in ("lossless", sp.Fisher(relative_error=0.3)):
        with sp.CheckpointManager(Path(folder, str(scheme)[:6]), scheme=scheme, background=True) as manager:
            for step in range(2):
                model(torch.randn(8, 64, device=device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                manager.save(step, model=model, optimizer=optimizer, rng=False)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1e-3)
            manager.wait()


def sanitizer(job: Job) -> None:
    """Errors that memcheck and racecheck find in small saves on side streams."""
    program = "import sys, device_checks; device_checks.save_on_side_streams(sys.argv[1], sys.argv[2])"
    where = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    with job.attempt(tool="none"):
        began = time.monotonic()
        save_on_side_streams(job.device.type, str(job.folder / "none"))
        job.add(tool="none", seconds=time.monotonic() - began)
    for tool in ("memcheck", "racecheck"):
        with job.attempt(tool=tool):
            if not (job.is_cuda and Path(where).exists()):
                job.add(tool=tool, note="not run: no compute-sanitizer" if job.is_cuda else "not run: on a CPU")
                continue
            if not job.fits(10, tool=tool):
                continue
            folder = job.folder / tool
            command = [where, "--tool", tool, "--error-exitcode", "99"]
            command += [sys.executable, "-c", program, job.device.type, str(folder)]
            env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else None
            began = time.monotonic()
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=env,
                cwd=Path(__file__).parent,
                timeout=job.seconds_left - 1,
            )
            print(done.stdout[-20_000:], done.stderr[-20_000:])
            summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout + done.stderr)
            figures = {"summary": summary[-1] if summary else "", "seconds": time.monotonic() - began}
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines() or [""]
                figures["error"] = f"ended with {done.returncode}: {lines[-1][:200]}"
            job.add(tool=tool, **figures)
