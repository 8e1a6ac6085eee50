"""The predicted seconds of a step on devices that need not be present."""

from .clock import Part as Part
from .prediction import Prediction as Prediction
from .prediction import predict as predict
