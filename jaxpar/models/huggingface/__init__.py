"""Models as Hugging Face keeps them: tables for each architecture, one reader and one writer."""

from .weights import Family as Family
