"""The command `jaxpar`: finds the subcommand, runs it, and turns errors into one line and an exit status.

`main` handles errors, `run` chooses the subcommand, and `_run_command` parses its options. The subcommands `train`,
`check` and `explain` are here; the others are in files of their own, which are imported on demand.
"""

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
from ...data import Chat, Text, Tokenizer
from ...data.streams import training
from ...hosts import consistency, ending, launch
from ...hosts.initialize import initialize, may_restart
from ...layout.distributed import attach
from ...make import TrainStep, make_train_step
from ...models import Named
from ...strategy import Strategy
from ..train.folder import write_whole
from ..train.loop import PER_PROCESS_OPTIONS, Hook
from ..train.progress import discard_output
from ..train.trainer import Trainer
from . import exports
from .model_sources import folder_path, is_folder, is_function, load_user_model, load_user_step
from .options import (
    INVOCATION_OPTIONS,
    CheckOptions,
    ExplainOptions,
    TrainOptions,
    model_of,
    optimizer_of,
    read,
    trainer_of,
)
from .parsing import in_flags, parse

_EXPLAIN_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ExplainOptions)}
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
  verify-checkpoint   compare a checkpoint with its checksums
  convert             make weights, or a Hugging Face folder, of a checkpoint

`jaxpar COMMAND --help` explains a command's options, `jaxpar --version` prints
the version. With JAXPAR_TRACEBACK=1 an error shows where it comes from.
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exits with 2 after an error that the user can correct, 1 if training failed or a file could not be read or written,
    130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        try:
            run(words)
        finally:
            # It is None if the shell has closed it. Flush here: Python flushes at its exit, where the error of a closed
            # pipe could not be caught any more.
            if sys.stdout is not None:
                sys.stdout.flush()
    except (ValueError, FloatingPointError, ImportError) as error:  # an ImportError says which package to install
        if os.environ.get("JAXPAR_TRACEBACK"):
            raise
        # Notes that begin with "---" are jax's, about its filtered tracebacks.
        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]
        message = "\n".join([str(error), *notes])
        print(f"jaxpar: {message}", file=sys.stderr)  # noqa: T201
        ending.fail(error, status := 1 if isinstance(error, FloatingPointError) else 2)
        sys.exit(status)
    # Before OSError, of which it is a subclass.
    except BrokenPipeError:  # the reader of the output has closed it, as `head` does
        if sys.stdout is not None:
            discard_output()
        sys.exit(1)
    except OSError as error:
        if os.environ.get("JAXPAR_TRACEBACK"):
            raise
        path = f"{error.filename}: " if error.filename else ""
        hint = "see that the place exists, may be written to and has room, or name another"
        print(f"jaxpar: {path}{error.strerror or error}; {hint}", file=sys.stderr)  # noqa: T201
        ending.fail(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def run(words: list[str]) -> None:
    """Run the command that the words name. Raises ValueError if it does not exist."""
    # Commands that import slowly are imported by their own case.
    match words:
        case [] | ["-h" | "--help"]:
            print(_USAGE, end="")  # noqa: T201
        case ["--version"]:
            print(f"jaxpar {version('jaxpar')}, jax {jax.__version__}")  # noqa: T201
        case ["train", *args]:
            _run_command(TrainOptions, "train", args, train, _default(args))
        case ["launch", *args]:
            # Behind "--" comes the command that launch starts, with its options.
            separator = args.index("--") if "--" in args else len(args)
            start_processes = lambda options: sys.exit(launch.launch(options, args[separator + 1 :]))
            _run_command(launch.LaunchOptions, "launch", args[:separator], start_processes)
        case ["check", *args]:
            _run_command(CheckOptions, "check", args, check, _default(args, CheckOptions))
        case ["explain", *args]:
            _run_command(ExplainOptions, "explain", args, explain, _default(args, ExplainOptions))
        case ["plan", *args]:
            from . import plan  # it imports slowly, so only on demand

            _run_command(plan.PlanOptions, "plan", args, plan.main)
        case ["timeline", *args]:
            from . import timeline

            _run_command(timeline.TimelineOptions, "timeline", args, timeline.main)
        case ["doctor", *args]:
            from . import doctor

            _run_command(doctor.DoctorOptions, "doctor", args, doctor.main)
        case ["verify-checkpoint", *args]:
            from . import checkpoints

            _run_command(checkpoints.VerifyOptions, "verify-checkpoint", args, checkpoints.verify)
        case ["convert", *args]:
            from . import checkpoints

            _run_command(checkpoints.ConvertOptions, "convert", args, checkpoints.convert)
        case [word, *_]:
            if message := removed(f"jaxpar {word}"):
                raise ValueError(message)
            commands = ["train", "launch", "explain", "check", "plan", "timeline", "doctor"]
            _raise_unknown(word, [*commands, "verify-checkpoint", "convert", "--help", "--version"])


def _run_command(
    options: type, command: str, words: list[str], call: Callable[[Any], Any], default: Any = None
) -> None:
    """Parse the options of a command, and run it.

    Errors of the library name an option as Python does (`broken='skip'`). Here they get the spelling of the command
    line (`--broken skip`).

    Args:
      options, command, words, default: as for `parse`.
      call: the command, called with the options.
    """
    try:
        call(parse(options, command, words, default))
    except (ValueError, FloatingPointError) as error:
        # Change the text in place, so that class, notes and traceback stay.
        error.args = (in_flags(str(error), options), *error.args[1:])
        raise


def _raise_unknown(word: str, commands: list[str]) -> NoReturn:
    hint = did_you_mean(word, commands) or f"; use {' or '.join(commands)}, or see jaxpar --help"
    raise ValueError(f"there is no command {word!r}{hint}")


def _default(words: list[str], cls: type[TrainOptions] = TrainOptions) -> TrainOptions:
    """Return the defaults of the options: from --config, or with --resume from the run in --out.

    These three options are read before the others, which take their defaults from that file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--config", "--out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--resume", nargs="?", const=True)
    try:
        # All words but these three options are left to `parse`.
        known_args, _ = parser.parse_known_args(words)
    except argparse.ArgumentError:
        return cls()  # `parse` reads the words again, and raises the error
    path = known_args.config
    if path is None and known_args.resume and known_args.out:
        run_config = place(known_args.out, "out") / "config.yaml"
        path = run_config if run_config.exists() else None
    return cls() if path is None else cls(**read(cls, path))


def train(options: TrainOptions) -> None:
    """Run `jaxpar train`: train the model that the options name, and print a sample of what it has learnt."""
    Strategy.parse(options.strategy)  # an error now, not after minutes
    # 1. Devices and processes. All processes must have the same options.
    initialize(options.coordinator, options.processes, options.process)
    attach(options.devices)
    consistency.compare(
        "the options", {name: value for name, value in vars(options).items() if name not in PER_PROCESS_OPTIONS}
    )
    options = exports.with_adapter(options)
    if options.export is not None:
        exports.check_exportable(options.model, options.export, options.length)
    # 2. The model and its data.
    options = _with_folder(options)
    begin = time.perf_counter()
    trainer, model = trainer_of(options, [Hook(on_start=functools.partial(_save_config, options))])
    source, say, activity = trainer.data, trainer.progress.say, trainer.progress.activity
    say(f"{options.model} on {getattr(source, 'description', 'its own data')}")
    if options.adapter is not None:
        say(exports.describe_adapter(options.adapter))
    if trainer.units.lines:
        values = ", ".join(f"{name} {value:.3f}" for name, value in trainer.units.lines.items())
        say(f"to compare with: {values} {trainer.units.loss}")
    # 3. Train.
    trainer.run()
    # With steps=0 the run has only explained its step.
    if options.steps == 0:
        return
    # 4. Export, and show a sample.
    say(f"{time.perf_counter() - begin:.1f} s; written: {options.out}")
    if options.export is not None:
        assert options.out is not None
        with activity(f"exporting to {options.export}"):
            exported = exports.export(options.model, options.out, options.export, options.export_dtype)
        say(f"exported: {exported}")
    # Only models by name read bytes. A folder's model has a tokenizer.
    generate = model is not None and not is_folder(options.model) and model.generate
    if options.sample and generate and isinstance(source, Text) and source.corpus is not None:
        # Sampling compiles another program, which takes tens of seconds if several processes share a machine.
        with activity(f"compiling and writing a sample of {options.sample} tokens"):
            sample = _sample(trainer, options, source.corpus.held_out[: options.length // 2], generate)
        say(f"a sample, after the beginning of the held-out text:\n{sample}")
    if options.sample and isinstance(source, Chat) and source.question is not None and model is not None:
        with activity(f"compiling and writing an answer of up to {options.sample} tokens"):
            answer = _answer(trainer, options, source, model)
        say(f"a prompt that was held out:\n{_printable(source.question.text)}\nand its answer:\n{_printable(answer)}")


def check(options: CheckOptions) -> None:
    """Run `jaxpar check`: compile the step that the options name, and compare its program with the strategy's promises.

    Exits with 1 if a promise is broken.
    """
    from ...inspect.check import findings as proofs  # only this command needs it

    proof = proofs.check(*_step_of(options), overlap=options.overlap)
    print(json.dumps(proof.json(), indent=1) if options.json else proof)  # noqa: T201
    if not proof.ok:
        sys.exit(1)


def explain(options: ExplainOptions) -> None:
    """Run `jaxpar explain`: compile the step that the options name, and print what it holds and sends."""
    if options.step is not None:
        _explain_user_step(options)
        return
    step, batch = _step_of(options)
    explanation = step.explain(batch)
    print(json.dumps(explanation.json(), indent=1) if options.json else explanation)  # noqa: T201
    if options.picture is not None:
        explanation.picture(options.picture)
        print(f"written: {options.picture}")  # noqa: T201


def _explain_user_step(options: ExplainOptions) -> None:
    """Run `jaxpar explain --step`: the same report, for a step that a user's function makes."""
    from ...forecast.own_step import explain  # only this needs it

    assert options.step is not None
    # Only a value other than the default shows that the user gave an option.
    changed = (name for name, default in _EXPLAIN_DEFAULTS.items() if getattr(options, name) != default)
    if option := next((name for name in changed if name not in ("step", "target", "devices", "json")), None):
        raise ValueError(
            f"--step names a whole step, which takes no --{option.replace('_', '-')}; leave one of the two out"
        )
    if options.target is not None:
        jax.config.update("jax_platforms", "cpu")  # without this, machines without GPUs lack the GPU compiler
    if options.target is None or options.devices is not None:
        attach(options.devices)
    step, *args = load_user_step(options.step)
    explanation = explain(step, *args, target=options.target)
    print(json.dumps(explanation.json(), indent=1) if options.json else explanation)  # noqa: T201


def _step_of(options: CheckOptions | ExplainOptions) -> tuple[TrainStep, Any]:
    """Return the step that the options name, on this machine's devices or for `--target`, and a batch for it."""
    from ...hardware.devices import target  # only what compiles for them needs it

    Strategy.parse(options.strategy)  # an error now, not after minutes
    devices = None
    if options.target is None:
        initialize(options.coordinator, options.processes, options.process)
        attach(options.devices)
    else:
        jax.config.update("jax_platforms", "cpu")  # without this, machines without GPUs lack the GPU compiler
        devices = target(options.target).devices
    if is_function(options.model):
        user_model = load_user_model(options.model)
        model, batch = user_model.model, user_model.example(options.rows)
        return make_train_step(model, optimizer_of(options, model, batch), options.strategy, devices), batch
    named_model, source = model_of(options)
    tx = optimizer_of(options, named_model.model, named_model.example(1, options.length))
    step = make_train_step(named_model.model, tx, options.strategy, devices, named_model.trainable)
    return step, next(training(source, options.rows, options.seed))


def _with_folder(options: TrainOptions) -> TrainOptions:
    """Return the options with a folder to write to: `--out`, or a new one, the same in every process."""
    if options.out is not None or options.steps == 0:
        return options
    if may_restart():
        raise ValueError("a run that may be restarted needs a folder to continue from; add --out FOLDER")
    # Clocks of hosts differ: all use the time of process 0.
    # int32 holds the seconds until 2038. Without x64, JAX has no wider integer.
    seconds = int(multihost_utils.broadcast_one_to_all(np.int32(time.time())))
    name = re.sub(r"[^\w.=-]+", "-", f"{options.model}-{options.strategy}")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
    return dataclasses.replace(options, out=Path("runs") / f"{name}-{stamp}")


def _save_config(options: TrainOptions, trainer: Trainer, metrics: dict[str, float]) -> None:
    """Write config.yaml into the folder of the run, and print what a resumed run changes in it."""
    if jax.process_index():
        return
    assert options.out is not None
    path = options.out / "config.yaml"
    # A resumed run may change some options. The file then has the new values, and the output says what they were.
    earlier = TrainOptions.load(path) if path.exists() else options
    for name in (field.name for field in dataclasses.fields(TrainOptions) if field.name not in INVOCATION_OPTIONS):
        if getattr(earlier, name) != getattr(options, name):
            trainer.progress.say(f"{name} is now {getattr(options, name)}, and was {getattr(earlier, name)}")
    write_whole(path, options.dump().encode())


def _sample(trainer: Trainer, options: TrainOptions, prompt: np.ndarray, generate: Callable[..., jax.Array]) -> str:
    """Return a prompt of bytes, uint8 [n], and the continuation by the trained model, as printable text."""
    module, key = trainer.step.model(trainer.state), jax.random.key(options.seed)
    tokens = generate(module, prompt[None], options.sample, key, window=options.length)
    return _printable(bytes(x for x in np.asarray(tokens)[0].tolist() if x < 256).decode(errors="replace"))


def _answer(trainer: Trainer, options: TrainOptions, source: Chat, model: Named) -> str:
    """Return the trained model's answer to the source's question: its most probable tokens."""
    assert source.question is not None
    assert model.generate is not None
    tokenizer = Tokenizer(folder_path(options.model))
    ((prompt, _),) = tokenizer.encode([source.question])
    module, stop = trainer.step.model(trainer.state), tokenizer.stop
    tokens = model.generate(module, prompt[None], options.sample, jax.random.key(0), temperature=0, stop=stop)
    return tokenizer.decode(np.asarray(tokens)[0, prompt.size :])


def _printable(text: str) -> str:
    """Return a text without control characters, which an untrained model writes and a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
