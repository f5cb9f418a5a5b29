# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["alpagym-plugins", "alpagym-runtime", "minari[hdf5]>=0.5.3", "pillow"]
#
# [tool.uv.sources]
# alpagym-plugins = { path = "../packages/plugins", editable = true }
# alpagym-runtime = { path = "../packages/runtime", editable = true }
# ///
"""A Minari dataset of drives at constant speed, and the environment that it recovers.

    uv run --script examples/minari_export.py --episodes 20

Stored drives of any policy go there with `alpagym episodes export --to minari`; this is the plain Gymnasium way.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import gymnasium
import numpy as np

ENV_ID = "alpagym_runtime:alpagym/Embedded-LowDim-v0"


def main() -> None:
    """Drive, write, read back, recover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--dataset", default="alpagym/constant-speed-v0")
    parser.add_argument("--root", help="Minari's folder of datasets; by default one that is thrown away")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = options.root or folder
        import minari
        from minari.data_collector import EpisodeBuffer

        env = gymnasium.make(ENV_ID, scenes=16)
        action = np.zeros(env.action_space.shape, np.float32)
        buffers, total = [], 0
        for episode in range(options.episodes):
            observation, _ = env.reset(seed=episode)
            observations, actions, rewards, ends, cuts = [observation], [], [], [], []
            while not ends or not (ends[-1] or cuts[-1]):
                observation, reward, terminated, truncated, _ = env.step(action)
                observations.append(observation)
                actions.append(action)
                rewards.append(reward)
                ends.append(terminated)
                cuts.append(truncated)
            total += len(actions)
            buffers.append(EpisodeBuffer(episode, episode, None, observations, actions, rewards, ends, cuts))
        minari.create_dataset_from_buffers(
            options.dataset,
            buffers,
            env=env,
            algorithm_name="constant speed",
            author="AlpaGym example",
            author_email="nobody@example.com",
            code_permalink="https://example.com",
            description="Keeps speed and heading.",
            requirements=["alpagym-runtime"],
        )
        dataset = minari.load_dataset(options.dataset)
        again = dataset.recover_environment()
        first = next(iter(dataset.iterate_episodes()))
        observation, _ = again.reset(seed=0)
        np.testing.assert_array_equal(observation, first.observations[0])
        for k, recorded in enumerate(first.actions):
            observation, reward, *_ = again.step(recorded)
            np.testing.assert_array_equal(observation, first.observations[k + 1])
            assert reward == first.rewards[k]
        assert dataset.total_steps == total
        print(f"{dataset.total_episodes} episodes, {dataset.total_steps} steps in {options.dataset}")
        print("the recovered environment drives episode 0 again, bit for bit")


if __name__ == "__main__":
    main()
