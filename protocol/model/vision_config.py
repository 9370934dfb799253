"""What a checkpoint's vision tower means for its prompts."""

import msgspec


class VisionConfig(msgspec.Struct, frozen=True):
    """The images of a model, as front end, scheduler and worker need them.

    Attributes:
        architecture: transformers' class of the whole checkpoint.
        token_id: token whose positions take the rows of an image.
        is_causal: positions of an image attend only to earlier ones, so that a chunk of a prompt may end inside it.
        mrope_section: how many pairs of rotary dimensions have positions in time, height and width; empty: positions
            are plain.
        num_deepstack: first layers behind each of which rows of the image are added to the residual stream.
    """

    architecture: str
    token_id: int
    is_causal: bool = True
    mrope_section: tuple[int, ...] = ()
    num_deepstack: int = 0
