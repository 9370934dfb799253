"""The settings of images: limits, where they may come from, and what reads them."""

from typing import Annotated

import msgspec

from quire.protocol.settings import Setting

IMAGES = "Images"


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of images as a user gives them."""

    allowed_media_domains: Annotated[
        list[str] | None,
        Setting(
            IMAGES,
            "hosts from which images are fetched that requests name by http(s) URLs: NAME, `*.NAME` for all names "
            "below it, or NAME:PORT. Only public addresses are connected to, also after redirects, and no proxy is "
            "used. Without it only `data:` URLs are read: [images](images.md)",
            metavar="DOMAIN",
            default="none",
        ),
    ] = None
    max_images_per_prompt: Annotated[
        int, Setting(IMAGES, "most images of one prompt, with those of earlier turns", range=(1, 2**16))
    ] = 64
    max_image_bytes: Annotated[
        int, Setting(IMAGES, "largest file of an image, also of one that is fetched", range=(1, 2**30), unit="bytes")
    ] = 20 * 2**20
    max_image_pixels: Annotated[
        int,
        Setting(IMAGES, "most pixels of an image. It is checked before the image is decoded", range=(1, 2**28)),
    ] = 50_000_000
    image_processes: Annotated[
        int,
        Setting(
            IMAGES,
            "number of processes of each front end that decode images and run the checkpoint's processor, at the "
            "lowest priority. They are started as they are needed, and need about 400 MB each; 0: one per core, at "
            "most 4",
            range=(0, 64),
        ),
    ] = 0
    image_memory_bytes: Annotated[
        int,
        Setting(
            IMAGES,
            "shared memory of each front end for processed images and given embeddings of open requests, sessions and "
            "stored responses; when it is full, requests with new ones get 503. A quarter of it keeps images for "
            "later requests. /dev/shm is used if it has as much room, else the folder of temporary files",
            range=(2**20, 2**50),
            unit="bytes",
        ),
    ] = 4 * 2**30
