"""Digests of C++ and CUDA sources that change with the code and not with comments or layout."""

import hashlib
import re
from pathlib import Path

SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"}

# In this order: a raw string must not be read as an identifier and a string, nor a comment as two operators.
TOKEN = re.compile(
    r"""
    (?P<raw> (?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)" )
  | (?P<string> (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" )
  | (?P<character> (?:u8|[uUL])?'(?:\\.|[^'\\\n])+' )
  | (?P<number> \.?\d(?:[eEpP][+-]|'\w|[\w.])* )
  | (?P<word> [^\W\d]\w* )
  | (?P<space> //(?:\\\r?\n|[^\n])* | /\*.*?\*/ | \\\r?\n | [^\S\n]+ )
  | (?P<newline> \n )
  | (?P<operator> <=>|<<=|>>=|\.\.\.|->\*|::|\+\+|--|->|\.\*|<<|>>|<=|>=|==|!=|&&|\|\||\#\#|[-+*/%&|^]=|. )
    """,
    re.VERBOSE | re.DOTALL,
)


def canonical(source):
    """The tokens of `source`, one a line; a preprocessor directive keeps its end and where it has white space."""
    parts = []
    directive, line_start, spaced = False, True, False
    for match in TOKEN.finditer(source):
        kind, text = match.lastgroup, match.group()
        if kind == "space":
            spaced = True
        elif kind == "newline":
            if directive:
                parts.append("<end of directive>")
            directive, line_start, spaced = False, True, False
        else:
            if line_start and text == "#":
                directive = True
            elif directive and spaced:
                parts.append("<space>")
            # A backslash at a line's end inside a string continues it.
            parts.append(re.sub(r"\\\r?\n", "", text) if kind == "string" else text)
            line_start = spaced = False
    return "\n".join(parts)


def file_digest(path):
    return hashlib.sha256(canonical(Path(path).read_text(encoding="utf-8")).encode()).hexdigest()


def tree_digest(root):
    """{"files": {path relative to root: digest}, "total": digest} of every source below `root`."""
    root = Path(root)
    paths = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    files = {path.relative_to(root).as_posix(): file_digest(path) for path in paths}
    total = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in files.items()).encode()).hexdigest()
    return {"files": files, "total": total}


def changes(recorded, current):
    """What differs between two results of `tree_digest`: ["changed: a.cu", "new: b.h", "gone: c.h"]."""
    old, new = recorded["files"], current["files"]
    lines = [f"changed: {name}" for name in old.keys() & new.keys() if old[name] != new[name]]
    lines += [f"new: {name}" for name in new.keys() - old.keys()]
    lines += [f"gone: {name}" for name in old.keys() - new.keys()]
    return sorted(lines)
