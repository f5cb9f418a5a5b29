"""Containers of a job's processes: Pyxis with enroot, Apptainer, or none. Text only; nothing here runs one.

An image is a file, or a registry's reference (`nvcr.io/nvidia/pytorch:25.06-py3`). A reference is fetched by the job
itself, into `deploy.slurm.container_cache` if that is set; the file there is named after the whole reference, so a tag
that has moved is fetched again once its file is removed.
"""

from __future__ import annotations

import hashlib
import re
import shlex

from alpagym_runtime.slurm_config import SlurmSection


def in_container(slurm: SlurmSection, names: list[str], gpus: bool) -> tuple[list[str], list[str]]:
    """What stands behind srun's own options, and what before the program; words of bash, quoted where they must be.

    Args:
        slurm: the section.
        names: variables whose values hold against the image's.
        gpus: whether the nodes have some.

    """
    if slurm.container_image is None:
        return [], []
    image = '"$image"' if _is_fetched(slurm) else shlex.quote(_reference(slurm))
    if slurm.container == "pyxis":
        options = [f"--container-image={image}", '--container-workdir="$PWD"']
        if slurm.container_mounts:
            options.append(f"--container-mounts={shlex.quote(','.join(slurm.container_mounts))}")
        if names:
            options.append(f"--container-env={','.join(names)}")
        return options, []
    command = ["apptainer", "exec", '--pwd="$PWD"']
    command += [f"--bind={shlex.quote(mount)}" for mount in slurm.container_mounts]
    return [], [*command, *(["--nv"] if gpus else []), image]


def fetch(slurm: SlurmSection) -> list[str]:
    """Lines of bash that put the path of the image into $image; none where srun or Apptainer finds it by itself."""
    if not _is_fetched(slurm):
        return []
    assert slurm.container_image is not None
    assert slurm.container_cache is not None
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", slurm.container_image)[-80:]
    digest = hashlib.sha256(slurm.container_image.encode()).hexdigest()[:12]
    suffix = "sqsh" if slurm.container == "pyxis" else "sif"
    source = shlex.quote(_reference(slurm) if slurm.container == "apptainer" else f"docker://{_reference(slurm)}")
    pull = (
        f'enroot import --output "$image.$SLURM_JOB_ID" {source}'
        if slurm.container == "pyxis"
        else f'apptainer pull "$image.$SLURM_JOB_ID" {source}'
    )
    return [
        f"image={shlex.quote(f'{slurm.container_cache}/{name}-{digest}.{suffix}')}",
        'if [ ! -e "$image" ]; then  # fetched under another name, so what has that one is whole',
        f"  mkdir -p -- {shlex.quote(slurm.container_cache)}",
        f'  {pull} && mv -n -- "$image.$SLURM_JOB_ID" "$image" || exit',
        "fi",
    ]


def _is_file(image: str) -> bool:
    return image.startswith(("/", "./", "../")) or image.endswith((".sqsh", ".sif"))


def _is_fetched(slurm: SlurmSection) -> bool:
    image = slurm.container_image
    return image is not None and slurm.container_cache is not None and not _is_file(image)


def _reference(slurm: SlurmSection) -> str:
    """The image as its program spells it: enroot parts the registry with '#', Apptainer wants a scheme."""
    assert slurm.container_image is not None
    image = slurm.container_image
    if _is_file(image):
        return image
    if slurm.container == "apptainer":
        return image if "://" in image else f"docker://{image}"
    registry, slash, rest = image.removeprefix("docker://").partition("/")
    named = slash and "#" not in image and (registry == "localhost" or re.search(r"[.:]", registry))
    return f"{registry}#{rest}" if named else image.removeprefix("docker://")
