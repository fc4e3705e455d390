"""The methods that `coterie compare` knows, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from protocol.errors import ConfigError
from sim.baselines.apfl import apfl
from sim.baselines.clustered import clustered
from sim.baselines.ditto import ditto
from sim.baselines.dpsgd import dpsgd
from sim.baselines.fedavg import fedavg
from sim.baselines.fedavg_plus import fedavg_plus
from sim.baselines.fedem import fedem
from sim.baselines.fedfomo import fedfomo
from sim.baselines.fedrep import fedrep
from sim.baselines.ifca import ifca
from sim.baselines.knn_per import knn_per
from sim.baselines.local import local
from sim.baselines.odcl import odcl
from sim.baselines.oracle import oracle
from sim.cohort import Method, Outcome
from sim.federico import check_federico, federico
from sim.federico_knn import check_federico_knn, federico_knn

METHODS: Mapping[str, Method] = {
    "local": local,
    "fedavg": fedavg,
    "fedavg+": fedavg_plus,
    "clustered": clustered,
    "ifca": ifca,
    "fedem": fedem,
    "fedfomo": fedfomo,
    "ditto": ditto,
    "fedrep": fedrep,
    "apfl": apfl,
    "dpsgd": dpsgd,
    "knn-per": knn_per,
    "odcl": odcl,
    "odcl-start": partial(odcl, start_steps=40),
    "oracle": oracle,
    "federico": federico,
    "federico-thrifty": partial(federico, profile="thrifty"),
    "federico-paper": partial(federico, profile="paper"),
    "federico+knn": federico_knn,
}
"""A method is one file and one line here."""


CHECKS: Mapping[Callable[..., Outcome], Callable[..., None]] = {
    federico: check_federico,
    federico_knn: check_federico_knn,
}
"""Of functions that take any keyword: what refuses what they can't use, given a budget first."""


def find_method(name: str) -> Method:
    """Return the method of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(METHODS)}"
        raise ConfigError(f"unknown method {name}; {advice}")
    return METHODS[name]


def function_of(name: str) -> tuple[Callable[..., Outcome], dict[str, Any]]:
    """Return the function behind a method, and the keywords that are set already.

    Raises:
        ConfigError: There is no such method.
    """
    method = find_method(name)
    return (method.func, method.keywords) if isinstance(method, partial) else (method, {})
