"""The command `jaxpar`."""

import argparse
import dataclasses
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from ...backend.files import place
from ...backend.removed import removed
from ...backend.text import did_you_mean
from ...data import Text
from ...data.streams import training
from ...hosts import consistency, ending, launch
from ...hosts.initialize import initialize, may_restart
from ...layout.distributed import attach
from ...make import TrainStep, make_train_step
from ...strategy import Strategy
from ..train.folder import write_whole
from ..train.loop import PER_PROCESS_OPTIONS, Hook
from ..train.progress import discard_output
from ..train.trainer import Trainer
from . import exports
from .model_sources import is_folder, is_function, load_user_model, load_user_step
from .options import PASSING, CheckOptions, ExplainOptions, TrainOptions, model_of, optimizer_of, read, trainer_of
from .parsing import in_flags, parse

_OF = {field.name: field.default for field in dataclasses.fields(ExplainOptions)}
_USAGE = """usage: jaxpar COMMAND [OPTIONS]

Train any Flax model under any parallelism strategy, and see what it costs.

commands:
  train               train a model by name, or see what that would take
  explain             show what a training step holds and sends on each device
  launch              start a script as several processes on this machine
  check               prove that a strategy takes effect, on devices here or not
  plan                rank strategies for devices that need not be here
  timeline            draw the schedule of a pipeline, before anything runs
  doctor              look at versions, devices, clocks, the shared folder
  verify-checkpoint   compare what is saved with its checksums
  convert             make weights, or a Hugging Face folder, of a checkpoint

`jaxpar COMMAND --help` explains a command's options, `jaxpar --version` prints
the version. With JAXPAR_TRACEBACK=1 an error shows where it comes from.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line. Exits with 2 where the user can mend what is wrong, 1 where training failed or a file
    could not be read or written, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
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
        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]  # but jax's own
        says = "\n".join([str(error), *notes])
        print(f"jaxpar: {says}", file=sys.stderr)  # noqa: T201
        ending.fail(error, status := 1 if isinstance(error, FloatingPointError) else 2)
        sys.exit(status)
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
        ending.fail(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def run(words: list[str]) -> None:
    """Finds the command in the words and runs it. Raises ValueError for one that does not exist."""
    match words:
        case [] | ["-h" | "--help"]:
            print(_USAGE, end="")  # noqa: T201
        case ["--version"]:
            print(f"jaxpar {version('jaxpar')}, jax {jax.__version__}")  # noqa: T201
        case ["train", *rest]:
            _run(TrainOptions, "train", rest, train, _default(rest))
        case ["launch", *rest]:
            cut = rest.index("--") if "--" in rest else len(rest)
            run_it = lambda options: sys.exit(launch.launch(options, rest[cut + 1 :]))
            _run(launch.LaunchOptions, "launch", rest[:cut], run_it)
        case ["check", *rest]:
            _run(CheckOptions, "check", rest, check, _default(rest, CheckOptions))
        case ["explain", *rest]:
            _run(ExplainOptions, "explain", rest, explain, _default(rest, ExplainOptions))
        case ["plan", *rest]:
            from . import plan  # only this command needs it

            _run(plan.PlanOptions, "plan", rest, plan.main)
        case ["timeline", *rest]:
            from . import timeline

            _run(timeline.TimelineOptions, "timeline", rest, timeline.main)
        case ["doctor", *rest]:
            from . import doctor

            _run(doctor.DoctorOptions, "doctor", rest, doctor.main)
        case ["verify-checkpoint", *rest]:
            from . import checkpoints

            _run(checkpoints.VerifyOptions, "verify-checkpoint", rest, checkpoints.verify)
        case ["convert", *rest]:
            from . import checkpoints

            _run(checkpoints.ConvertOptions, "convert", rest, checkpoints.convert)
        case [word, *_]:
            if says := removed(f"jaxpar {word}"):
                raise ValueError(says)
            known = ["train", "launch", "explain", "check", "plan", "timeline", "doctor"]
            _unknown(word, [*known, "verify-checkpoint", "convert", "--help", "--version"])


def _run(options: type, command: str, words: list[str], call: Callable[[Any], Any], default: Any = None) -> None:
    """Runs a command. Its errors name options as the command line spells them: the library says `broken='skip'`."""
    try:
        call(parse(options, command, words, default))
    except (ValueError, FloatingPointError) as error:
        error.args = (in_flags(str(error), options), *error.args[1:])
        raise


def _unknown(given: str, known: list[str]) -> NoReturn:
    near = did_you_mean(given, known) or f"; use {' or '.join(known)}, or see jaxpar --help"
    raise ValueError(f"there is no command {given!r}{near}")


def _default(words: list[str], cls: type[TrainOptions] = TrainOptions) -> TrainOptions:
    """What the command line adds to: the options of --config, or with --resume those of the run in --out."""
    look = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--config", "--out"):
        look.add_argument(name, type=Path)
    look.add_argument("--resume", nargs="?", const=True)
    try:
        given, _ = look.parse_known_args(words)
    except argparse.ArgumentError:
        return cls()  # tyro says what is wrong
    path = given.config
    if path is None and given.resume and given.out:
        there = place(given.out, "out") / "config.yaml"
        path = there if there.exists() else None
    return cls() if path is None else cls(**read(cls, path))


def train(options: TrainOptions) -> None:
    """`jaxpar train`: builds what the options name, trains it, and shows what it has learnt."""
    Strategy.parse(options.strategy)  # before anything that takes time
    initialize(options.coordinator, options.processes, options.process)
    attach(options.devices)
    consistency.compare(
        "the options", {name: value for name, value in vars(options).items() if name not in PER_PROCESS_OPTIONS}
    )
    if options.export is not None:
        exports.check_exportable(options.model, options.export, options.length)
    options = _placed(options)
    begin = time.perf_counter()
    trainer, model = trainer_of(options, [Hook(on_start=functools.partial(_keep_config, options))])
    source, say, activity = trainer.data, trainer.progress.say, trainer.progress.activity
    say(f"{options.model} on {getattr(source, 'description', 'its own data')}")
    if is_folder(options.model) and isinstance(source, Text) and source.corpus is not None:
        say("text is read as bytes, which are no tokens of this model; its tokenizer makes ids for --data ids.npy")
    if trainer.units.lines:
        values = ", ".join(f"{name} {value:.3f}" for name, value in trainer.units.lines.items())
        say(f"to compare with: {values} {trainer.units.loss}")
    trainer.run()
    if options.steps == 0:
        return
    say(f"{time.perf_counter() - begin:.1f} s; written: {options.out}")
    if options.export is not None:
        assert options.out is not None
        with activity(f"exporting to {options.export}"):
            exported = exports.export(options.model, options.out, options.export, options.export_dtype)
        say(f"exported: {exported}")
    writes = model is not None and not is_folder(options.model) and model.generate
    if options.sample and writes and isinstance(source, Text) and source.corpus is not None:
        # It compiles a program of its own, for tens of seconds where several processes share a machine.
        with activity(f"compiling and writing a sample of {options.sample} tokens"):
            sample = _sample(trainer, options, source.corpus.held_out[: options.length // 2], writes)
        say("a sample, after the beginning of the held-out text:")
        say(sample)


def check(options: CheckOptions) -> None:
    """`jaxpar check`: compiles the step that the options name, and prints what its strategy promised and what was
    found. Exits with 1 where a promise is broken.
    """
    from ...inspect.check import findings as proofs  # only this command needs it

    proof = proofs.check(*_step_of(options), overlap=options.overlap)
    print(json.dumps(proof.json(), indent=1) if options.json else proof)  # noqa: T201
    if not proof.ok:
        sys.exit(1)


def explain(options: ExplainOptions) -> None:
    """`jaxpar explain`: compiles the step that the options name, and prints what it holds and sends."""
    if options.step is not None:
        _explain_own(options)
        return
    step, batch = _step_of(options)
    found = step.explain(batch)
    print(json.dumps(found.json(), indent=1) if options.json else found)  # noqa: T201
    if options.picture is not None:
        found.picture(options.picture)
        print(f"written: {options.picture}")  # noqa: T201


def _explain_own(options: ExplainOptions) -> None:
    """Of a step of the user's."""
    from ...forecast.own_step import explain  # only this needs it

    assert options.step is not None
    others = {"picture": options.picture, "config": options.config}
    others |= {name: getattr(options, name) for name in ("model", "strategy") if getattr(options, name) != _OF[name]}
    if given := next((name for name, value in others.items() if value is not None), None):
        raise ValueError(f"--step is a step by itself, and has no --{given}; leave one of the two out")
    if options.target is not None:
        jax.config.update("jax_platforms", "cpu")  # else the compiler for GPUs is missing where there is none
    if options.target is None or options.devices is not None:
        attach(options.devices)
    step, *args = load_user_step(options.step)
    found = explain(step, *args, target=options.target)
    print(json.dumps(found.json(), indent=1) if options.json else found)  # noqa: T201


def _step_of(options: CheckOptions | ExplainOptions) -> tuple[TrainStep, Any]:
    """The step that the options name, on devices here or not, and a batch for it."""
    from ...hardware.devices import target  # only what compiles for them needs it

    Strategy.parse(options.strategy)  # before anything that takes time
    devices = None
    if options.target is None:
        initialize(options.coordinator, options.processes, options.process)
        attach(options.devices)
    else:
        jax.config.update("jax_platforms", "cpu")  # else the compiler for GPUs is missing where there is none
        devices = target(options.target).devices
    if is_function(options.model):
        mine = load_user_model(options.model)
        batch = mine.example(options.rows)
        return make_train_step(mine.model, optimizer_of(options, mine.model, batch), options.strategy, devices), batch
    model, source = model_of(options)
    tx = optimizer_of(options, model.model, model.example(1, options.length))
    step = make_train_step(model.model, tx, options.strategy, devices, model.trainable)
    return step, next(training(source, options.rows, options.seed))


def _placed(options: TrainOptions) -> TrainOptions:
    """The options with a folder to write to: a new one, the same in every process, unless one is named."""
    if options.out is not None or options.steps == 0:
        return options
    if may_restart():
        raise ValueError("a run that is started again goes on from its own folder, and none is named; add --out FOLDER")
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
    write_whole(path, options.dump().encode())


def _sample(trainer: Trainer, options: TrainOptions, prompt: np.ndarray, generate: Callable[..., jax.Array]) -> str:
    """The prompt, bytes uint8 [n], and what the model writes after it."""
    module, key = trainer.step.model(trainer.state), jax.random.key(options.seed)
    tokens = generate(module, prompt[None], options.sample, key, window=options.length)
    text = bytes(token for token in np.asarray(tokens)[0].tolist() if token < 256).decode(errors="replace")
    # A model that has learnt little writes control characters, and a terminal would obey them.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
