"""Symlinks below a root file system that is mounted somewhere else, as a process chrooted to it would resolve them."""

from pathlib import Path

# As many symlinks as Linux follows in one path before it fails with ELOOP.
MAX_LINKS = 40


def resolve_links(path: Path, root: Path) -> Path:
    """Resolve all symlinks of a path below `root`, of its folders too; what does not exist stays as it is.

    Debian links its libraries through /etc/alternatives, Flatcar the folder of its driver.
    """
    left, resolved, followed = list(path.relative_to(root).parts), root, 0
    while left:
        part = left.pop(0)
        if part == "..":
            resolved = root if resolved == root else resolved.parent
            continue
        following = resolved / part
        if followed == MAX_LINKS or not following.is_symlink():
            resolved = following
            continue
        followed += 1
        target = following.readlink()
        if target.is_absolute():
            resolved = root
        left[:0] = [each for each in target.parts if each != "/"]
    return resolved
