"""Files of a process that name its control groups and their mounts."""

from pathlib import Path


def process(folder: Path, groups: list[str], mounts: list[tuple[str, Path, str]]) -> Path:
    """Write a process's files. `mounts`: root, mount point, and file system with options."""
    points = [
        (root, str(point).replace(" ", r"\040"), *kind.split()) for root, point, kind in mounts
    ]
    lines = [
        f"31 23 0:28 {root} {point} rw,nosuid shared:9 - {system} cgroup rw,{options}"
        for root, point, system, options in points
    ]
    (folder / "cgroup").write_text("\n".join(groups))
    (folder / "mountinfo").write_text("\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", *lines]))
    return folder
