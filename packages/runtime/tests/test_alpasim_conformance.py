"""AlpaSim (the fake one) keeps the contract of every simulator, with and without pictures."""

from __future__ import annotations

from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig
from alpagym_runtime.testing.conformance import SimulatorConformance
from alpagym_runtime.testing.fake_alpasim import FakeAlpaSim
from alpagym_runtime.types import PolicySpec

WARM = {"force_gt_duration_us": 300_000}


class Conformance(SimulatorConformance):
    fake: FakeAlpaSim
    skip = True

    @classmethod
    def setup_class(cls):
        cls.fake = FakeAlpaSim(cameras=dict(cls.policy_spec.cameras), skip_driver_during_force_gt=cls.skip)
        cls.fake.start()

    @classmethod
    def teardown_class(cls):
        cls.fake.stop()

    def make(self, slots):
        config = AlpasimConfig(address=self.fake.address, skip_driver_during_force_gt=self.skip, **WARM)
        return config.build(self.policy_spec, DatasetSection(), slots, self.labels)


class TestPoses(Conformance):
    policy_spec = PolicySpec()


class TestPicturesAndWarmUp(Conformance):
    policy_spec = PolicySpec(cameras={"front": (32, 48), "left": (24, 32)}, frames=3, actors=4)
    skip = False
