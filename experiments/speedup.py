"""How the speed of data parallelism grows with the number of devices, predicted for GPUs that are not here.

JAX_PLATFORMS=cpu python experiments/speedup.py
JAX_PLATFORMS=cpu python experiments/speedup.py --strategy fsdp --rows 1 --devices 8 64

Each device gets the same number of rows on any number of devices. Every size is compiled (`make gpu-compiler`) and
predicted; nothing runs. Each takes about 20 s of a core.
"""

from dataclasses import dataclass

import optax
import tyro
from report import console
from rich.table import Table

import jaxpar as jp
from jaxpar.hardware import target
from jaxpar.inspect.predict import predict
from jaxpar.models import named


@dataclass(frozen=True)
class Options:
    """Compiles one strategy for several numbers of devices."""

    model: str = "llama3.2-1b"
    """the name of a model"""
    strategy: str = "ddp"
    """without precision"""
    kind: str = "H100"
    """the kind of device, in hosts of 8"""
    devices: tuple[int, ...] = (1, 8, 16, 64, 256)
    """numbers of devices"""
    rows: int = 4
    """of each device"""
    length: int = 2048
    """tokens of a row"""


def main() -> None:
    options, table = tyro.cli(Options, description=__doc__), Table("devices", "step, ms", "exposed, ms", "speed-up")
    model, screen, first = named(options.model), console(), None
    for devices in options.devices:
        chips, rows = target(f"{devices}x{options.kind}"), devices * options.rows
        batch = model.example(rows, options.length)
        strategy = f"{options.strategy if devices > 1 else 'single'},precision=bf16"
        step = jp.make_train_step(model.model, optax.adamw(3e-4), strategy, mesh=chips.devices)
        flops = model.flops(rows, options.length)
        prediction = predict(step.compile(batch), step, batch, chips.hardware, flops)
        speed = devices / prediction.seconds
        first = first or speed
        figures = f"{1e3 * prediction.seconds:.1f}", f"{1e3 * prediction.exposed:.1f}", f"{speed / first:,.1f}"
        table.add_row(f"{devices:,}", *figures)
    screen.print(table)


if __name__ == "__main__":
    main()
