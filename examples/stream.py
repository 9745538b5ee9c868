"""Streams one completion from a DeltaFlash server and prints it as it comes.

python examples/stream.py 127.0.0.1:50051 "Once upon a time"
"""

import argparse
import sys
import time

from deltaflash_client import Client, Delta, Finished, SamplingOptions, StoppingOptions


def main() -> None:
    """Prints the text, then one line with usage and times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="address of the server, host:port")
    parser.add_argument("prompt", help="the text that the answer continues")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()

    with Client(args.target) as client:
        client.wait_until_ready(timeout_s=30.0)
        started_s = time.perf_counter()
        stream = client.generate(
            args.prompt,
            sampling=SamplingOptions(temperature=args.temperature, seed=args.seed),
            stopping=StoppingOptions(max_tokens=args.max_tokens),
        )
        for event in stream:
            match event:
                case Delta():
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                case Finished():
                    report(event, time.perf_counter() - started_s)


def report(finished: Finished, elapsed_s: float) -> None:
    """Prints what the last event says."""
    usage, stats = finished.usage, finished.stats
    first_ms = (stats.time_to_first_token_us or 0) / 1000
    decode_s = stats.decode_us / 1e6
    rate = (usage.completion_tokens - 1) / decode_s if decode_s > 0 else 0.0
    print(
        f"\n[{finished.finish_reason}: {usage.prompt_tokens} prompt + "
        f"{usage.completion_tokens} completion tokens in {stats.steps} steps; "
        f"first token after {first_ms:.1f} ms, then {rate:.0f} tokens/s; "
        f"{elapsed_s * 1000:.0f} ms in all]"
    )


if __name__ == "__main__":
    main()
