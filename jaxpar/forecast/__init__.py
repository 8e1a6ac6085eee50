"""Forecast what a step would cost elsewhere: rank strategies, and report on steps that jaxpar did not make."""
