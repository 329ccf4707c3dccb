"""Flower, imported before any test: what it imports warns of names to be removed."""

import os
import warnings

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1")

with warnings.catch_warnings():
    # typer 0.20 imports names that click 8.5 means to remove
    warnings.simplefilter("ignore", DeprecationWarning)
    import flwr.serverapp.strategy  # noqa: F401
