"""Whether Triton kernels can be launched in this process, and what their launches cost."""

import functools

from quire.version import install_command


@functools.cache
def require_launchable(device_type: str) -> None:
    """Raise a readable error if Triton kernels cannot be launched for tensors on this device type.

    Args:
        device_type: ``torch.device.type`` of the tensors, such as ``cuda``.

    Raises:
        RuntimeError: triton is not installed, or the tensors are not on a GPU and Triton's interpreter is off.
    """
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(f"Triton kernels need the triton package: {install_command('triton')}") from error
    if device_type != "cuda" and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            f"Triton kernels need CUDA, and the tensors are on {device_type!r}; to run them slowly in Triton's "
            "interpreter, set TRITON_INTERPRET=1 before Python starts"
        )


def drop_unused_launch_hooks() -> None:
    """Let Triton describe launches only if a profiler has asked for it: otherwise each launch costs 3 µs more."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if all(hook is not None and not hook.calls for hook in hooks):
        knobs.runtime.launch_enter_hook = knobs.runtime.launch_exit_hook = None
