"""Conversion from and to the files of Hugging Face: tables for each architecture, one reader and one writer."""

from .weights import Family as Family
