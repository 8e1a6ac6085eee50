"""An asynchronous parameter server over gRPC, there to be measured; README.md says when not to."""

from .server import Pushed as Pushed
from .server import Server as Server
from .worker import Worker as Worker
from .worker import WorkerStep as WorkerStep
