"""``make gpu-check``: all checks that need a GPU, in one command, on a machine without a network.

It compares kernels with their references and the engine with transformers, and runs the benchmark of the kernels. The
script needs only Python's standard library. Missing packages are installed from wheels (``make gpu-wheels``) into a
build folder. A failing part does not stop the others. The output ends with a table and one line of JSON; the exit
status is 1 if anything failed.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
GRID = "tests/kernels/grid"
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "granite"),
    *("gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "llama4"),
)
IN_BFLOAT16 = ("llama", "qwen3", "gemma3")

PARTS = ("grid", "marked", "equality", "kernels")
CHECKS_SHARE = 0.5
"""Share of the time for checks of kernels and engine. The benchmark, which needs the GPU alone, gets the rest."""

JOB_S = 240.0
LONG_FILE = 6000
"""Bytes of a grid file above which it is run in parts."""

REPORT_S = 10.0
NO_TESTS = 5
"""pytest's exit status if no tests were selected."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes run: the folder for their files, and their environment."""

    build: Path
    environment: dict[str, str]


@dataclass(slots=True)
class Job:
    """One process and its result.

    Attributes:
        read: fills in the other fields from the process's output.
        notes: descriptions of failures for the report.
    """

    part: str
    name: str
    command: list[str]
    read: Callable[["Job", int, str], None]
    ok: bool = False
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    args = _arguments()
    started = time.monotonic()
    end = started + args.time_limit - REPORT_S
    parts = [part for part in PARTS if not args.parts or part in args.parts.split(",")]
    place, notes = prepare(args.build, args.wheels, args.dry_run)
    facts = machine_job(place)
    jobs: list[Job] = []
    if facts.ok:
        checks = check_jobs(parts, args.dry_run)
        run_all(checks, args.processes, started + CHECKS_SHARE * args.time_limit, place)
        jobs = checks
        if "kernels" in parts:
            bench = bench_job(place, end - time.monotonic(), args.dry_run, args.quick)
            run_one(bench, end + REPORT_S, place)
            jobs.append(bench)
    report([facts, *jobs], notes, args, time.monotonic() - started)
    sys.exit(0 if all(job.ok for job in [facts, *jobs]) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check kernels, engine and speed on this machine's GPU.")
    parser.add_argument("--parts", metavar="A,B", help=f"parts to run, of {', '.join(PARTS)} (all)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", metavar="DIR", help="wheels (./wheels)")
    build = ROOT / "build" / "gpu-check"
    parser.add_argument("--build", type=Path, default=build, metavar="DIR", help="build folder (build/gpu-check)")
    parser.add_argument("--time-limit", type=float, default=520.0, metavar="SECONDS", help="total time (520)")
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), metavar="N")
    parser.add_argument("--quick", action="store_true", help="fewer shapes in the benchmark")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, to test the script itself")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for gpu-check.json, in addition to stdout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the JSON, in addition to stdout")
    return parser.parse_args()


# ---- preparation


def prepare(build: Path, wheels: Path, dry_run: bool) -> tuple[Place, list[str]]:
    """Create the build folder, install missing packages; return where processes run, and notes on failed installs."""
    build = build.resolve()
    site, path = build / "site", build / "path"
    for folder in (site, path, build / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    # Not the repository's root: its folders have the names of other packages.
    link = path / "quire"
    if not link.is_symlink():
        link.symlink_to(ROOT / "quire", target_is_directory=True)
    notes = [] if dry_run else install(wheels, site)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(
            map(str, (site, path, *(ROOT / "tests" / "support").iterdir(), ROOT / "tests/nightly/gpu"))
        ),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(build / "triton"),
        "OMP_NUM_THREADS": "1" if dry_run else "2",
    }
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"
    return Place(build, environment), notes


def install(wheels: Path, site: Path) -> list[str]:
    """Install the wheels of missing packages; installed packages match its torch and transformers and are kept."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not _is_installed(wheel.name.split("-")[0], site)]
    if not missing:
        return []
    command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--upgrade", "--target", str(site)]
    done = subprocess.run([*command, *map(str, missing)], capture_output=True, text=True, check=False)
    return [f"wheels: {_last_words(done.stderr)}"] if done.returncode else []


def _is_installed(name: str, site: Path) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return any(site.glob(f"{name}-*.dist-info"))
    return True


def machine_job(place: Place) -> Job:
    """Report the versions and the device; the job fails if no check can run."""
    code = (
        "import json, platform, importlib.metadata as m, torch, triton, quire.worker_proc.startup.setup\n"
        "cuda = torch.cuda.is_available()\n"
        "has = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, "
        "'triton': triton.__version__, 'transformers': has.get('transformers', ''), "
        "'device': torch.cuda.get_device_name() if cuda else 'cpu'}))"
    )

    def read(job: Job, status: int, output: str) -> None:
        job.ok = status == 0
        if job.ok:
            job.found = json.loads(output.strip().splitlines()[-1])
            if job.found["device"] == "cpu" and "TRITON_INTERPRET" not in place.environment:
                job.ok, job.notes = False, ["torch finds no CUDA device"]

    job = Job("machine", "imports", [sys.executable, "-P", "-c", code], read)
    run_one(job, time.monotonic() + 120, place)
    return job


# ---- jobs


def check_jobs(parts: Sequence[str], dry_run: bool) -> list[Job]:
    """Return the jobs of checks, the longest first, because they are started in this order."""
    jobs = []
    if "grid" in parts:
        jobs += _grid_jobs(dry_run)
    if "equality" in parts:
        dtypes = {family: ["float32", *(["bfloat16"] if family in IN_BFLOAT16 else [])] for family in FAMILIES}
        if dry_run:
            dtypes = {"llama": ["float32"]}
        jobs += [_equality_job(family, dtype, dry_run) for family, all_of in dtypes.items() for dtype in all_of]
    if "marked" in parts and not dry_run:
        # This test runs the grid, which is run file by file above.
        duplicate = "tests/kernels/test_triton.py::test_grid_on_the_device"
        files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
        names = [str(file.relative_to(ROOT)) for file in files]
        jobs += [_pytest_job("marked", name, [name, "-m", "gpu", "--deselect", duplicate]) for name in names]
    return jobs


def _grid_jobs(dry_run: bool) -> list[Job]:
    """Return a job per grid file, and several for long files, whose kernels take the longest to compile."""
    if dry_run:
        name = "dense/gated_activation.py"
        return [_pytest_job("grid", name, [f"{GRID}/{name}", "-k", "fp16", "-p", "shard", "--shard", "0/2"])]
    jobs = []
    # A file's size indicates how many kernels it compiles.
    for file in sorted((ROOT / GRID).rglob("*.py"), key=lambda file: -file.stat().st_size):
        if file.name == "conftest.py":
            continue
        shards = 4 if file.stat().st_size > LONG_FILE else 1
        for index in range(shards):
            place = file.relative_to(ROOT / GRID)
            name = f"{place}" if shards == 1 else f"{place} {index + 1}/{shards}"
            arguments = [f"{GRID}/{place}", "-p", "shard", "--shard", f"{index}/{shards}"]
            jobs.append(_pytest_job("grid", name, arguments))
    return jobs


def bench_job(place: Place, seconds: float, dry_run: bool, quick: bool) -> Job:
    target = place.build / "kernels.json"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "quire.launch.cli", "bench", "kernels", "--json", str(target)]
    command += ["--dry-run"] if dry_run else ["--device", "cuda", "--time-limit", f"{max(seconds - 60, 30):.0f}"]
    command += ["--quick"] if quick else []
    command += ["--sections", "cpu_prefill,cache_write"] if dry_run else []

    def read(job: Job, status: int, output: str) -> None:
        if status or not target.exists():
            return
        job.found = json.loads(target.read_text(encoding="utf-8"))
        sections = job.found["results"]["sections"].values()
        # Failures of other libraries do not count.
        own = [row for section in sections for row in section["rows"] if row["implementation"].startswith("quire")]
        job.failed = sum(bool(row["error"]) for row in own) + sum(bool(section["error"]) for section in sections)
        job.passed = len(own) - sum(bool(row["error"]) for row in own)
        job.notes = [note for note in job.found["notes"] if not dry_run]
        job.ok = job.failed == 0

    return Job("kernels", "quire bench kernels", command, read)


def _pytest_job(part: str, name: str, arguments: list[str]) -> Job:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *arguments]

    def read(job: Job, status: int, output: str) -> None:
        counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
        for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", _last_words(output)):
            counts[word] = int(count)
        job.passed, job.failed = counts["passed"], counts["failed"] + counts["error"]
        job.ok = status in (0, NO_TESTS)
        job.found = {"skipped": counts["skipped"]}
        job.notes = [line[:300] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))][:8]

    return Job(part, name, command, read)


def _equality_job(family: str, dtype: str, dry_run: bool) -> Job:
    command = [sys.executable, "-P", str(ROOT / "tests/nightly/gpu/equality.py"), family, "--dtype", dtype]

    def read(job: Job, status: int, output: str) -> None:
        cases = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
        bad = [case for case in cases if not case["ok"]]
        job.passed, job.failed = len(cases) - len(bad), len(bad)
        job.ok = status == 0 and bool(cases) and not bad
        job.notes = [f"{case['case']}: {case['problem']}" for case in bad]
        job.found = {"captured": sum(case["captured"] for case in cases)}

    return Job("equality", f"{family} {dtype}", command + (["--dry-run"] if dry_run else []), read)


# ---- running the jobs


def run_all(jobs: Sequence[Job], processes: int, end: float, place: Place) -> None:
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda job: run_one(job, min(end, time.monotonic() + JOB_S), place), jobs))


def run_one(job: Job, end: float, place: Place) -> None:
    """Run a job until ``end``, with its output in a log file."""
    started = time.monotonic()
    if end - started < 1:
        job.notes = ["not started: the time limit was reached"]
        return
    log = place.build / "logs" / (re.sub(r"\W+", "-", f"{job.part} {job.name}") + ".log")
    with log.open("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            job.command,
            cwd=ROOT,
            env=place.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _finish(process, end)
        file.seek(0)
        output = file.read()
    job.seconds = time.monotonic() - started
    job.read(job, status, output)
    if not job.ok and not job.notes:
        job.notes = [f"status {status}: {_last_words(output)}"]
    print(f"{job.part} {job.name}: {'ok' if job.ok else 'FAILED'}, {job.seconds:.1f} s", file=sys.stderr, flush=True)


def _finish(process: "subprocess.Popen[bytes]", end: float) -> int:
    """Return the exit status; at ``end`` the process group is killed."""
    try:
        return process.wait(timeout=max(end - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return process.wait()


def _last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no output"


# ---- report


def report(jobs: Sequence[Job], notes: list[str], args: argparse.Namespace, seconds: float) -> None:
    """Print a table, notes and one line of JSON, in the format of the other benchmarks."""
    found = {
        "benchmark": "gpu-check",
        "settings": {"dry_run": args.dry_run, "quick": args.quick, "time_limit": args.time_limit},
        "results": {"seconds": round(seconds, 1), "jobs": [_as_dict(job) for job in jobs]},
        "notes": notes + [f"{job.part} {job.name}: {note}" for job in jobs for note in job.notes],
    }
    width = max(len(f"{job.part} {job.name}") for job in jobs)
    print(f"{'check'.ljust(width)}  result  passed  failed       s")
    for job in jobs:
        name = f"{job.part} {job.name}".ljust(width)
        result = "ok" if job.ok else "FAILED"
        print(f"{name}  {result:>6}  {job.passed:>6}  {job.failed:>6}  {job.seconds:>6.1f}")
    print()
    for note in found["notes"]:
        print(note)
    line = json.dumps(found)
    print(line, flush=True)
    for target in (args.json, args.out and args.out / "gpu-check.json"):
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(line + "\n", encoding="utf-8")


def _as_dict(job: Job) -> dict[str, Any]:
    kept = ("part", "name", "ok", "passed", "failed", "seconds", "notes", "found")
    return {name: getattr(job, name) for name in kept} | {"seconds": round(job.seconds, 1)}


if __name__ == "__main__":
    main()
