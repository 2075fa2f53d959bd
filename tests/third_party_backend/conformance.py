"""The suite that the package's author runs. Not part of this repository's tests: `test_plain_ddp.py` installs the
package and then runs it."""

from __future__ import annotations

from plain_ddp.backend import PlainDdpOptions, plain_ddp

from rl_transformers.testing import BackendConformance, Variant

PADDED = {"use_sample_packing": False}


class TestPlainDdp(BackendConformance):
    backend = plain_ddp
    options = PlainDdpOptions()
    variants = (
        Variant(spec=PADDED),
        Variant(world_size=2, spec=PADDED),
        Variant(world_size=2, spec=PADDED, options=PlainDdpOptions(reduce_in_float64=True), parity_only=True),
    )
    preload = ("plain_ddp.worker",)
