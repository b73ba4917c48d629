"""What run_pretraining.py does: read the configuration, build the trainer, run it, and turn errors into exit codes."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from pretrain import distributed
from pretrain.config import UserError, parse
from pretrain.metrics import wandb_is_busy

USER_ERROR, TRAINING_FAILED = 2, 1


def _leave(code: int) -> None:
    """Exit; at once where an orderly exit would wait: for other ranks in a collective, or for a wandb that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (code != 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1) or wandb_is_busy():
        os._exit(code)
    if code != 0:
        sys.exit(code)


def _end(code: int, message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
    _leave(code)


def main(arguments: list[str] | None = None) -> None:
    """Run a pretraining from the command line; exit code 0 done or stopped by a signal, 1 training failed, 2 user's mistake."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    logging.getLogger().setLevel(logging.WARNING)
    try:
        config = parse(arguments)
    except UserError as error:
        _end(USER_ERROR, str(error))
    # After the configuration: `--help` and mistakes need not wait for these imports.
    from pretrain.trainer import Trainer, TrainingFailed

    try:
        Trainer(config).run()
        distributed.stop()
        _leave(0)
    except (TrainingFailed, OSError) as error:
        # An OSError is a full disk or a file system that went away: the message says which file.
        _end(TRAINING_FAILED, str(error))
    except Exception as error:
        # The library's checks of what the user gave; a ValueError from the depths of PyTorch keeps its traceback.
        if isinstance(error, ValueError) and _raised_here(error):
            _end(USER_ERROR, str(error))
        traceback.print_exc()
        _end(TRAINING_FAILED, _describe(error))


def _describe(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text:
        text += "\nout of memory: lower train.micro_batch_size (the curve stays the same), or set train.activation_checkpointing"
    return text


def _raised_here(error: BaseException) -> bool:
    """Whether this project's own code raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    filename = frames[-1].filename if frames else ""
    return filename.startswith(root) and "site-packages" not in filename
