"""The command `jaxpar`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import tyro
from jax.experimental import multihost_utils

from .. import __version__
from ..data import Text
from ..data.streams import training
from ..layout import distributed
from ..make import make_train_step
from ..strategy import Strategy
from ..text import did_you_mean
from ..train.loop import Hook
from ..train.progress import discard_output
from ..train.trainer import Trainer
from .options import PASSING, CheckOptions, TrainOptions, model_of, optimizer_of, read, trainer_of

_USAGE = """usage: jaxpar COMMAND [OPTIONS]

Train any Flax model under any parallelism strategy, and see what it costs.

commands:
  train               train a model by name, or see what that would take
  check               prove that a strategy takes effect, on devices here or not
  plan                rank strategies for devices that need not be here
  timeline            draw the schedule of a pipeline, before anything runs
  bench collectives   measure this machine's collectives as nccl-tests does

`jaxpar COMMAND --help` explains a command's options, `jaxpar --version` prints
the version. With JAXPAR_TRACEBACK=1 an error shows where it comes from.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line. Exits with 2 where the user can mend what is wrong, 1 where training failed or a file
    could not be read or written, 130 after Ctrl-C and 143 after SIGTERM.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        try:
            run(words)
        finally:
            if sys.stdout is not None:  # it is where a shell has closed it
                sys.stdout.flush()  # here, not at exit, where nothing could answer to a pipe that is closed
    except (ValueError, FloatingPointError, ImportError) as error:  # the last says what to install
        if os.environ.get("JAXPAR_TRACEBACK"):
            raise
        print(f"jaxpar: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
    except BrokenPipeError:  # whoever read the output has seen enough, as `head`
        if sys.stdout is not None:
            discard_output()
        sys.exit(1)
    except OSError as error:
        if os.environ.get("JAXPAR_TRACEBACK"):
            raise
        where = f"{error.filename}: " if error.filename else ""
        hint = "see that the place exists, may be written to and has room, or name another"
        print(f"jaxpar: {where}{error.strerror or error}; {hint}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def run(words: list[str]) -> None:
    """Finds the command in the words and runs it. Raises ValueError for one that does not exist."""
    match words:
        case [] | ["-h" | "--help"] | ["bench"] | ["bench", "-h" | "--help"]:
            print(_USAGE, end="")  # noqa: T201
        case ["--version"]:
            print(f"jaxpar {__version__}, jax {jax.__version__}")  # noqa: T201
        case ["train", *rest]:
            train(_parse(TrainOptions, "train", rest, _default(rest)))
        case ["check", *rest]:
            check(_parse(CheckOptions, "check", rest, _default(rest, CheckOptions)))
        case ["plan", *rest]:
            from . import plan  # only this command needs it

            plan.main(_parse(plan.PlanOptions, "plan", rest))
        case ["timeline", *rest]:
            from . import timeline

            timeline.main(_parse(timeline.TimelineOptions, "timeline", rest))
        case ["bench", "collectives", *rest]:
            from ..inspect.bench import bandwidth

            bandwidth.main(_parse(bandwidth.BenchOptions, "bench collectives", rest))
        case ["bench", *rest]:
            _unknown(" ".join(["bench", *rest[:1]]), ["bench collectives"])
        case [word, *_]:
            _unknown(word, ["train", "check", "plan", "timeline", "bench collectives", "--help", "--version"])


def _parse(options: type, command: str, words: list[str], default: Any = None) -> Any:
    extra = {} if default is None else {"default": default}
    return tyro.cli(options, prog=f"jaxpar {command}", args=words, config=(tyro.conf.FlagCreatePairsOff,), **extra)


def _unknown(given: str, known: list[str]) -> NoReturn:
    near = did_you_mean(given, known) or f"; use {' or '.join(known)}, or see jaxpar --help"
    raise ValueError(f"there is no command {given!r}{near}")


def _default(words: list[str], cls: type[TrainOptions] = TrainOptions) -> TrainOptions:
    """What the command line adds to: the options of --config, or with --resume those of the run in --out."""
    look = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--config", "--out"):
        look.add_argument(name, type=Path)
    look.add_argument("--resume", action="store_true")
    try:
        given, _ = look.parse_known_args(words)
    except argparse.ArgumentError:
        return cls()  # tyro says what is wrong
    path = given.config
    if path is None and given.resume and given.out and (given.out / "config.yaml").exists():
        path = given.out / "config.yaml"
    return cls() if path is None else cls(**read(cls, path))


def train(options: TrainOptions) -> None:
    """`jaxpar train`: builds what the options name, trains it, and shows what it has learnt."""
    Strategy.parse(options.strategy)  # before anything that takes time
    distributed.join(options.coordinator, options.processes, options.process)
    distributed.attach(options.devices)
    model, source = model_of(options)
    options = _placed(options)
    begin = time.perf_counter()
    trainer = trainer_of(options, model, source, [Hook(on_start=functools.partial(_keep_config, options))])
    say = trainer.progress.say
    say(f"{options.model} on {source.description}")
    if trainer.units.lines:
        values = ", ".join(f"{name} {value:.3f}" for name, value in trainer.units.lines.items())
        say(f"to compare with: {values} {trainer.units.loss}")
    trainer.run()
    if options.steps == 0:
        return
    say(f"{time.perf_counter() - begin:.1f} s; written: {options.out}")
    if options.sample and isinstance(source, Text) and source.corpus is not None and model.generate is not None:
        if jax.process_count() > 1:
            say("no sample of text is generated where there are several processes")
        else:
            say("a sample, after the beginning of the held-out text:")
            say(_sample(trainer, options, source.corpus.held_out[: options.length // 2], model.generate))


def check(options: CheckOptions) -> None:
    """`jaxpar check`: compiles the step that the options name, and prints what its strategy promised and what was
    found. Exits with 1 where a promise is broken.
    """
    from ..inspect.check import findings as proofs  # only this command needs it
    from ..inspect.targets.devices import target

    Strategy.parse(options.strategy)  # before anything that takes time
    devices = None
    if options.target is None:
        distributed.join(options.coordinator, options.processes, options.process)
        distributed.attach(options.devices)
    else:
        jax.config.update("jax_platforms", "cpu")  # else the compiler for GPUs is missing where there is none
        devices = target(options.target).devices
    model, source = model_of(options)
    step = make_train_step(model.model, optimizer_of(options), options.strategy, devices)
    batch = next(training(source, options.rows, options.seed))
    proof = proofs.check(step, batch)
    print(json.dumps(proof.json(), indent=1) if options.json else proof)  # noqa: T201
    if not proof.ok:
        sys.exit(1)


def _placed(options: TrainOptions) -> TrainOptions:
    """The options with a folder to write to: a new one, the same in every process, unless one is named."""
    if options.out is not None or options.steps == 0:
        return options
    now = int(multihost_utils.broadcast_one_to_all(np.int32(time.time())))
    name = re.sub(r"[^\w.=-]+", "-", f"{options.model}-{options.strategy}")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return dataclasses.replace(options, out=Path("runs") / f"{name}-{stamp}")


def _keep_config(options: TrainOptions, trainer: Trainer, metrics: dict[str, float]) -> None:
    """Writes config.yaml beside the run, and says what a resumed run has changed in it."""
    if jax.process_index():
        return
    assert options.out is not None
    path = options.out / "config.yaml"
    before = TrainOptions.load(path) if path.exists() else options
    for name in (field.name for field in dataclasses.fields(TrainOptions) if field.name not in PASSING):
        if getattr(before, name) != getattr(options, name):
            trainer.progress.say(f"{name} is now {getattr(options, name)}, and was {getattr(before, name)}")
    path.write_text(options.dump())


def _sample(trainer: Trainer, options: TrainOptions, prompt: np.ndarray, generate: Callable[..., jax.Array]) -> str:
    """The prompt, bytes uint8 [n], and what the model writes after it."""
    module, key = trainer.step.model(trainer.state), jax.random.key(options.seed)
    tokens = generate(module, prompt[None], options.sample, key, window=options.length)
    text = bytes(token for token in np.asarray(tokens[0]).tolist() if token < 256).decode(errors="replace")
    # A model that has learnt little writes control characters, and a terminal would obey them.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
