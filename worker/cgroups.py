"""The control groups of a process, whose files limit its memory and its CPU time. No torch."""

import re
from collections.abc import Iterator
from pathlib import Path

# A line of /proc/self/mountinfo: root, mount point, version and options.
MOUNT = re.compile(r"\S+ \S+ \S+ (\S+) (\S+) .* - (cgroup2?) \S+ (\S+)")


def cgroup_folders(process: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of a process's control groups, version 2 or 1, up to the roots of their
    mounts. `process`: its folder in /proc.

    A container may see a host's path that its mount does not have: missing folders are included.
    """
    groups = [line.split(":", 2)[1:] for line in lines_of(process / "cgroup")]
    for mount in filter(None, map(MOUNT.match, lines_of(process / "mountinfo"))):
        root, mount_point = (
            re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)
            for path in mount.group(1, 2)
        )
        version, options = mount.group(3, 4)
        name = controller if version == "cgroup" else ""
        if name and name not in options.split(","):
            continue
        for controllers, path in groups:
            if name in controllers.split(","):
                inside = Path(path).relative_to(root if Path(path).is_relative_to(root) else "/")
                group = Path(mount_point) / inside
                for folder in (group, *group.parents):
                    if folder.is_relative_to(mount_point):
                        yield folder


def lines_of(path: str | Path) -> list[str]:
    """Return a file's lines; none if it cannot be read."""
    try:
        return Path(path).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
