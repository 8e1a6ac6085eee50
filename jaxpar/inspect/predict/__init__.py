"""Seconds of a step on devices that are not there."""

from .clock import Part as Part
from .prediction import Prediction as Prediction
from .prediction import predict as predict
