"""What an entry point imports when it runs. Imports between packages are a rule: tools/rules/layers.py."""

import subprocess
import sys


def test_imports_without_torch() -> None:
    modules = "quire.scheduler_proc.__main__, quire.launch.cli, quire.frontend.http.__main__, quire.launch.offline.llm"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'huggingface_hub'))); import {modules}"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_help_imports_no_heavy_library() -> None:
    """``quire --help`` takes less than 0.3 s only without these imports."""
    code = (
        "import sys, quire.launch.cli as c\n"
        "for words in (['--help'], ['serve', '--help=all'], ['completion', 'bash']):\n"
        "    try: c.main(words)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'zmq', 'starlette', 'uvicorn', 'tokenizers', 'jinja2',"
        " 'yaml', 'asyncio', 'psutil', 'httpx', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("run-batch", "--port", "complete"))
