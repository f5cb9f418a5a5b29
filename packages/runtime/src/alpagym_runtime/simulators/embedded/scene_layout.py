"""The layout of scene files: members, version, and AlpaSim's words for kinds of road users."""

from __future__ import annotations

VERSION = 1
OWN = "alpagym.json"
RIG, TRACKS, MAP, METADATA = "rig_trajectories.json", "sequence_tracks.json", "map.xodr", "metadata.yaml"

START_US = 1_700_000_000_000_000
"""Time of a written log's first sample: AlpaSim's clients take 0 for "not set"."""

CLASSES = {
    **{"car": "automobile", "truck": "heavy_truck", "bus": "bus", "motorcycle": "motorcycle"},
    **{"bicycle": "bicycle", "pedestrian": "person", "static": "protruding_object"},
}
"""AlpaSim's `label_class` by our kind."""

KINDS_BY_CLASS = {name: kind for kind, name in CLASSES.items()} | {
    **{"other_vehicle": "car", "trailer": "truck", "train_or_tram_car": "bus", "trolley_bus": "bus"},
    **{"rider": "bicycle", "cyclist": "bicycle", "stroller": "pedestrian", "pedestrian": "pedestrian"},
    **{"car": "car", "truck": "truck", "animal": "pedestrian"},
}

PLACE_MAX_M = 1e7
HEIGHT_M = 1.5
"""Of every box: the embedded world has no heights."""
