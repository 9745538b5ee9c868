"""Sends a PDF to a DeltaFlash server and prints its pages as Markdown, as soon as each is whole.

python examples/parse_document.py 127.0.0.1:50051 report.pdf
"""

import argparse
import sys
from pathlib import Path

from deltaflash_client import (
    Client,
    Delta,
    DocumentFinished,
    DocumentStarted,
    Finished,
    PageEvent,
    PageFailed,
    Pdf,
)


def main() -> None:
    """Prints the pages in the order of their ends, and a line for each that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="address of the server, host:port")
    parser.add_argument("pdf", type=Path)
    parser.add_argument("--dpi", type=int, default=None)
    args = parser.parse_args()

    texts: dict[int, list[str]] = {}
    with (
        Client(args.target) as client,
        client.parse_document(Pdf.from_file(args.pdf, dpi=args.dpi)) as stream,
    ):
        for event in stream:
            match event:
                case DocumentStarted():
                    print(f"{event.num_pages} pages", file=sys.stderr)
                case PageEvent(index, Delta(text)):
                    texts.setdefault(index, []).append(text)
                case PageEvent(index, Finished()):
                    print(f"<!-- page {index + 1} -->\n\n{''.join(texts.pop(index, []))}\n")
                case PageEvent(index, PageFailed(error)):
                    print(f"page {index + 1}: {error}", file=sys.stderr)
                case DocumentFinished():
                    print(f"{event.usage.completion_tokens} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
