"""The child's side: one process that decodes what it is sent, within limits.

Run as `python -m server.images.worker FD LIMITS`, where FD is a SOCK_SEQPACKET socket and LIMITS
the fields of ImageLimits as JSON. A message is a JSON object and a descriptor of the file's bytes;
the answer is another, with a descriptor of the pixels if there are any. Whatever goes wrong inside
a codec, the parent reads JSON and bytes, nothing that could run.

The process ends when the socket does. Signals of a terminal or a supervisor are for the parent.
"""

import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from PIL import Image

from server.images import decode, pdf
from server.images.formats import ImageFormat
from server.images.limits import ImageLimits, ImageSize
from server.images.refusal import ImageRefusedError, RefusalReason
from server.images.resize import resize
from server.images.shared_bytes import SharedBytes

MAX_MESSAGE_BYTES = 1 << 16
MAX_TEXT_CHARS = 2000
MAX_DESCRIPTORS = 64

Message = dict[str, Any]


def main() -> None:
    """Serves jobs until the parent closes the socket."""
    limits = ImageLimits(**json.loads(sys.argv[2]))
    restrict(limits)
    warnings.simplefilter("ignore")
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        channel.send(b'{"ready": true}')
        # From here on, what is written to stderr is a codec's complaint about a caller's file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while serve_one(channel, limits):
            pass


def restrict(limits: ImageLimits) -> None:
    """Gives up what a decoder does not need."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    with contextlib.suppress(OSError):
        # If the machine has no memory left, this process goes, and not the server.
        Path("/proc/self/oom_score_adj").write_text("1000")


def serve_one(channel: socket.socket, limits: ImageLimits) -> bool:
    """Answers one message; returns False when there will be no more."""
    text, descriptors, _, _ = socket.recv_fds(
        channel, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
    )
    if not text:
        return False
    # The parent ends a job by the clock. This is for a parent that is no more.
    used_s = math.ceil(time.process_time())
    resource.setrlimit(
        resource.RLIMIT_CPU,
        (used_s + math.ceil(limits.decode_timeout_s) + 1, resource.RLIM_INFINITY),
    )
    payload = SharedBytes(descriptors[0])
    answer, pixels = do_job(json.loads(text), payload, limits)
    payload.close()
    with contextlib.suppress(BrokenPipeError):
        socket.send_fds(channel, [json.dumps(answer).encode()], [pixels.fd] if pixels else [])
    return True


def do_job(
    job: Message, payload: SharedBytes, limits: ImageLimits
) -> tuple[Message, SharedBytes | None]:
    """Returns the answer to a message, and pixels.

    The answer has one key: `image` (what was made), `num_pages`, `refused` (the file is at fault)
    or `fault` (this program is).
    """
    is_image = job["kind"] == "image"
    try:
        data = payload.read()
        if job["kind"] == "count_pages":
            return {"num_pages": pdf.count_pages(data)}, None
        size = ImageSize(**job["size"])
        try:
            if is_image:
                picture = decode.decode(data, ImageFormat(job["format"]), limits)
            else:
                max_pixels = min(limits.max_pixels, size.max_pixels)
                picture = pdf.render_page(data, job["index"], job["dpi"], max_pixels, limits)
        except (ImageRefusedError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  # codecs raise anything for a damaged file
            reason = RefusalReason.INVALID if is_image else RefusalReason.DOCUMENT_INVALID
            what = f"the {job['format']} file" if is_image else f"page {job['index']} of the PDF"
            raise ImageRefusedError(
                reason, f"{what} cannot be decoded: {type(error).__name__}: {error}"
            ) from None
        return prepared(picture, size)
    except ImageRefusedError as error:
        text = str(error)[:MAX_TEXT_CHARS]
        return {"refused": [error.reason.value, text, error.metadata]}, None
    except MemoryError:
        limit = limits.memory_bytes
        facts = {"value": f"over {limit}", "limit": str(limit)}
        text = f"the file needs more memory to decode than the {limit} bytes allowed"
        return {"refused": [RefusalReason.TOO_LARGE.value, text, facts]}, None
    except Exception:  # noqa: BLE001  # the edge of the process; the parent logs it
        return {"fault": traceback.format_exc()[-MAX_TEXT_CHARS:]}, None


def prepared(picture: Image.Image, size: ImageSize) -> tuple[Message, SharedBytes]:
    """Returns facts and pixels of the picture that the model reads."""
    source_width, source_height = picture.size
    resized = resize(picture, size)
    pixels = resized.tobytes()
    digest = hashlib.sha256(f"{resized.height} {resized.width} 3 uint8\n".encode())
    digest.update(pixels)
    facts = {
        "width": resized.width,
        "height": resized.height,
        "source_width": source_width,
        "source_height": source_height,
        "digest": digest.hexdigest(),
    }
    return {"image": facts}, SharedBytes.write(pixels)


if __name__ == "__main__":
    main()
