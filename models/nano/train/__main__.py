"""Trains the nano model: one command a run.

    python -m models.nano.train --out DIR --minutes 8 [--resume DIR --start 2]

Writes `log.jsonl`, `plot.png`, the checkpoint (`model-*.safetensors`, their index and the training
heads) and, after it, `eval.json` with the scores.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains the nano model.")
    parser.add_argument("--out", type=Path, required=True, help="log, checkpoint, scores")
    parser.add_argument("--cache", type=Path, help="fonts and texts")
    parser.add_argument("--resume", type=Path, help="folder of the checkpoint to go on from")
    parser.add_argument("--start", type=int, default=0, help="first stage: 0, 1 or 2")
    parser.add_argument("--seed", type=int, default=1, help="another one for each run of a chain")
    parser.add_argument("--minutes", type=float, default=8.0, help="of stepping and compiling")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--decay-from", type=float, default=0.4)
    parser.add_argument("--final-lr", type=float, default=0.03, help="share of the peak")
    parser.add_argument("--batch-scale", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--smoke", action="store_true", help="a few steps of each page shape")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--eval-pages", type=int, default=0, help="0: all; negative: none")
    parser.add_argument("--eval-batch", type=int, default=128)
    parser.add_argument("--eval-seconds", type=float, default=90.0)
    return parser.parse_args()


def main() -> None:
    """The command."""
    args = parse()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = time.monotonic()
    import torch

    from models.nano.data import faces
    from models.nano.data.batches import Loader
    from models.nano.data.fetch import CACHE
    from models.nano.train.evaluate import evaluate, print_scores
    from models.nano.train.loop import BrokenRunError, Run, RunConfig
    from models.nano.train.paint import Painter
    from models.nano.train.plot import plot
    from models.nano.train.stages import STAGES, smoke_stages

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._dynamo.config.recompile_limit = 32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(os.cpu_count() or 1)
    cache = args.cache or CACHE
    faces_list = faces.list_faces(cache)
    metrics_path = faces.cached_metrics(cache, args.workers)
    loader = Loader(cache, metrics_path, args.workers, ahead=3 * args.workers)
    small, big = faces.load_glyphs(faces_list, min(args.workers, 8))
    painter = Painter(small, big, device)
    del small, big
    config = RunConfig(
        out=args.out, resume=args.resume, start=args.start, seed=args.seed, minutes=args.minutes,
        lr=args.lr, warmup=args.warmup, decay_from=args.decay_from, final_lr=args.final_lr,
        batch_scale=args.batch_scale, compiled=not args.no_compile,
        max_steps=args.log_every * len(smoke_stages()) if args.smoke else args.max_steps,
        log_every=args.log_every, save_every_s=120.0,
    )  # fmt: skip
    stages = smoke_stages() if args.smoke else STAGES
    run = Run(config, loader, painter, stages)
    run.log({"prepared_s": round(time.monotonic() - begun, 1), "faces": len(faces_list),
             "workers": args.workers, "argv": sys.argv[1:]})  # fmt: skip
    failure = None
    try:
        run.train()
    except BrokenRunError as error:
        failure = str(error)
        run.log({"broken": failure})
    finally:
        loader.close()
    run.log({"trained_s": round(run.elapsed, 1), "steps": run.step, "pages": run.pages})
    plot(args.out / "log.jsonl", args.out / "plot.png")
    if failure is not None:
        raise SystemExit(f"stopped: {failure}")
    if args.eval_pages >= 0:
        content = evaluate(
            args.out, args.out / "eval.json", cache, metrics_path, workers=args.workers,
            pages=args.eval_pages, batch=args.eval_batch, seconds=args.eval_seconds,
        )  # fmt: skip
        print_scores(content)
        run.log({"seconds": content["seconds"], "all": json.dumps(content["scores"]["all"])})


if __name__ == "__main__":
    main()
