"""Names of what `metrics.jsonl` holds: one registry, for trainers that write them and reports that read them.

A line has `stage` (imitation, grpo, …, or evaluate/<name>), `step` within the stage, and numbers. Names before a slash
are families whose second part is free: `term/progress`, `rate/offroad`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What a number means: `words` for people, `unit` ("" for a plain number)."""

    words: str
    unit: str = ""


METRICS: dict[str, Metric] = {
    # drives of the step; void and initially faulty ones are left out
    "reward": Metric("mean reward of an episode"),
    "reward_std": Metric("standard deviation of the reward over episodes"),
    "term/": Metric("mean of one reward term an episode, scaled; the terms sum to the reward"),
    "driving_score": Metric("mean driving score"),
    "rate/": Metric("share of drives with the event"),
    "drive/speed_ratio": Metric("distance driven over that of the recording in the same time"),
    "drive/standing_share": Metric("share of the time below 0.5 m/s"),
    "drive/weaving_per_s": Metric("changes between left and right turns", "1/s"),
    "open_loop/": Metric("means over drawn plans: ade_m (distance to the recorded drive), comfort in [-1, 0]"),
    "ticks": Metric("decisions driven"),
    # what became of the episodes
    "void": Metric("episodes that the infrastructure failed"),
    "initial_fault": Metric("episodes at fault before the policy drove"),
    "non_finite": Metric("episodes whose reward is not finite"),
    "episodes_episodes": Metric("episodes that were driven to their end"),
    "episodes_retried": Metric("attempts that failed and were made again"),
    "episodes_failed": Metric("episodes given up after all retries"),
    "episodes_stale": Metric("episodes of weights that are older than trainer.max_lag allows"),
    "episodes_trained": Metric("episodes that Cosmos-RL handed to the policy replicas, the stale ones left out"),
    "pending": Metric("episodes that are driven and wait to be trained on, where drives are made ahead"),
    # workers
    "workers/": Metric("alive: connected; restarts, lost: of workers and of episodes with them; queued: to be driven"),
    # groups and decisions
    "groups": Metric("groups of the step"),
    "groups_dropped": Metric("groups with too few valid episodes"),
    "groups_collapsed": Metric(
        "share of the groups whose rewards are all equal, of those with two drives in the batch"
    ),
    "groups_informative": Metric("groups whose rewards differ, so that they teach something"),
    "decisions": Metric("decisions in valid groups"),
    "decisions_kept": Metric("decisions whose advantage is worth a gradient"),
    # the update
    "loss": Metric("loss"),
    "kl": Metric("KL divergence from the weights that drove (k3 estimate)", "nat"),
    "kl_stopped": Metric("1 where the KL limit ended the step's passes"),
    "clip_share": Metric("share of decisions whose ratio was outside the clip"),
    "ratio_min": Metric("smallest probability ratio"),
    "ratio_mean": Metric("mean probability ratio"),
    "ratio_max": Metric("largest probability ratio"),
    "entropy": Metric("entropy of the policy", "nat"),
    "value_loss": Metric("half the squared error of the value"),
    "value_mean": Metric("mean value of the states, before the step"),
    "explained_variance": Metric("share of the returns' variance that the value explained before the step"),
    "advantage_std": Metric("standard deviation of the advantages before normalisation"),
    "learning_rate": Metric("learning rate of the step, of weights without a factor of their own"),
    "gradient_norm": Metric("norm of the gradient before clipping"),
    "steps_refused": Metric("optimiser steps refused because something was not finite"),
    "staleness_mean": Metric("mean age of the weights that decided, in versions"),
    "staleness_max": Metric("largest age of the weights that decided, in versions"),
    # imitation
    "samples": Metric("decisions imitated an epoch"),
    "validation_loss": Metric("loss on drives of validation scenes"),
    "validation_samples": Metric("decisions behind it"),
    "epochs_waited": Metric("epochs since the validation loss last fell"),
    "cooling_down": Metric("1 in an epoch in which the rate falls to nothing, with cool_down"),
    # supervised fine-tuning
    "loss_trajectory": Metric("mean cross-entropy over trajectory tokens and their markers", "nat"),
    "loss_text": Metric("mean cross-entropy over the other labelled words", "nat"),
    "epoch": Metric("passes over the training split so far"),
    # time
    "seconds": Metric("the whole step", "s"),
    "seconds_drive": Metric("making episodes: simulate, observe, render, act and the rest of the loop", "s"),
    "seconds_fetch": Metric("reading a step's episodes from the rollouts", "s"),
    "seconds_train": Metric("forward, backward and optimiser", "s"),
    "seconds_data": Metric("waiting for samples, and making words and patches of them", "s"),
    "seconds_simulate": Metric("the world's steps, with their observations unless in a thread of its own", "s"),
    "seconds_observe": Metric("observations on their own, and labels; without cameras", "s"),
    "seconds_render": Metric("camera pictures", "s"),
    "seconds_act": Metric("the policy's forwards while driving", "s"),
    "throughput/decisions_per_s": Metric("decisions driven and trained on", "1/s"),
    "throughput/samples_per_s": Metric("decisions imitated", "1/s"),
    # evaluations
    "low": Metric("lower bound of the driving score (95 %)"),
    "high": Metric("upper bound of the driving score (95 %)"),
    "n": Metric("drives that count"),
    "failed": Metric("drives that the infrastructure failed"),
}


def describe(name: str) -> Metric | None:
    """The metric behind a name; None for one that a plugin brought."""
    return METRICS.get(name) or METRICS.get(f"{name.partition('/')[0]}/")
