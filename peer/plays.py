"""Parse plain texts of plays into what each speaking role says.

Editions come in four forms; the one in which most speeches are found is taken::

    HAMLET.                      Ham.                         HAMLET. A little more than kin,
    A little more than kin,      A little more than kin,        and less than kind.
    and less than kind.          and less than kind.
                                                                Ham. A little more then kin,
                                                              and lesse then kinde

The speaker's name stands alone after an empty line, or before the speech, and then is indented or
in capitals. Stage directions, headings of acts and scenes, casts, license texts and songs with a
heading of their own are nobody's speech. A role is a name as it is printed: KING and KING HENRY are
two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.errors import DataError

_MARK = "\0"  # where a direction in brackets stood
_BRACKETED = re.compile(r"<<[^<>]*>>|[\[{](?:[^\[\]{}\n]|\n(?!\n))*[\]}]?")
_UNBRACKETED = re.compile(
    r"\s*(?:(?:[A-Z][\w ,]{0,40}\. )?(?:(?:Re-)?[Ee]nter|Exit|Exeunt|Manet)"
    r"|Flourish|Alarums?|Sennet|Thunder)\b"
)
_AT_THE_RIGHT = re.compile(r"(?<=\S)\s{3,}(?:(?:Re-)?[Ee]nter|Exit|Exeunt)\b.*")

_LICENSE_ENDS = re.compile(r"\*\*\* ?START OF|\*END\*? ?THE SMALL PRINT", re.IGNORECASE)
_LICENSE_BEGINS = re.compile(r"\*\*\* ?END OF|End of (?:the |this )?Project Gut", re.IGNORECASE)
_CAST = re.compile(
    r"\W*(?:dramatis person\w*|(?:the )?(?:persons|characters) (?:represented|(?:of|in) the play)"
    r"|the (?:actors'? names|names of (?:all )?the actors))\W*",
    re.IGNORECASE,
)
_ACT = (
    r"\W*(?:(?:ACT|SCENE|Actus|Sc[aeoæœ]{1,2}na)\b"
    r"|(?:Act|Scene) (?:[IVXLC]+|\d+|First|Second|Third|Fourth|Fifth)\b)"
)
_BEGINNING = re.compile(rf"{_ACT}|\W*(?:THE )?(?:PROLOGUE|INDUCTION)\W*$")
_NOBODY = re.compile(
    rf"{_ACT}|FINIS\b|\W*(?:[IVXLC]{{2,}}|(?:THE )?(?:SONG|LETTER|END)|DUMB SHOW)\W*$"
)

_SMALL_WORDS = frozenset({"a", "and", "de", "of", "the", "to", "with"})
_NAME_WORD = r"[\w&][\w'\N{RIGHT SINGLE QUOTATION MARK}&-]*"
_NAME = re.compile(rf"{_NAME_WORD}(?:(?:\. |, | ){_NAME_WORD}){{0,5}}")
_MAX_NAME = 40
_BEFORE_SPEECH = re.compile(r"(\s{0,8})([^\s.:][^:\t]{0,39}?)(?:[.:]\s+|\t+)(?=\S)")

_Begins = dict[int, tuple[str, str]]
"""The lines in which a speech begins, each with the speaker and the first words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One speaking role of one play.

    Attributes:
        play: The play; a King Henry of another one is another role.
        name: As the speeches are headed, in capitals.
        speeches: In the order of the play, each in one line, white space collapsed.
    """

    play: str
    name: str
    speeches: tuple[str, ...]


def read_roles(text: str, title: str) -> list[Role]:
    """Parse an edition of a play, or of several, into its roles.

    Args:
        text: The whole file. Where it has several casts, each begins a play.
        title: What to call the play; several are numbered, as in "works 2".

    Returns:
        The roles in the order of their first speeches. The time taken is linear in the text.

    Raises:
        DataError: There is no speech in it.
    """
    text = "\n".join(line.rstrip() for line in text.splitlines())
    lines = list(_without_license(_BRACKETED.sub(_MARK, text).split("\n")))
    plays = [play for part in _divide(lines) if (play := _read_play(part))]
    if not plays:
        raise DataError(
            "no speech is found: give each speaker's name before the speech, or alone in a line "
            "after an empty one"
        )
    return [
        Role(
            play=title if len(plays) == 1 else f"{title} {number}",
            name=name,
            speeches=tuple(speeches),
        )
        for number, play in enumerate(plays, start=1)
        for name, speeches in play.items()
    ]


def _without_license(lines: Sequence[str]) -> Iterator[str]:
    begin = max((i for i, line in enumerate(lines) if _LICENSE_ENDS.match(line)), default=-1)
    for line in lines[begin + 1 :]:
        if _LICENSE_BEGINS.match(line):
            return
        yield line


def _divide(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut a file at its casts, and drop each cast: all up to the first act."""
    casts = [i for i, line in enumerate(lines) if _CAST.fullmatch(line)]
    for cast, end in zip([None, *casts], [*casts, len(lines)], strict=True):
        begin = next((i for i in range(cast or 0, end) if _BEGINNING.match(lines[i])), cast)
        if begin != cast or cast is None:
            yield lines[begin or 0 : end]


def _read_play(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return the speeches of each role."""
    begins = max(_forms(lines), key=len)
    # Where directions have brackets, a line of verse may well begin with "Enter".
    in_brackets = sum(line.startswith(_MARK) for line in lines) * 20 > len(begins)
    speeches: list[tuple[str, list[str]]] = []
    spoken: list[str] = []  # the lines of whoever speaks now, at first nobody
    in_direction, after_blank = False, True
    for index, line in enumerate(lines):
        if index in begins:
            speaker, words = begins[index]
            spoken, in_direction = [_AT_THE_RIGHT.sub("", words)], False
            speeches.append((speaker, spoken))
        elif _is_blank(line):
            in_direction = False
        elif _NOBODY.match(line) or _is_name(line, capitals=True):
            spoken = []
        elif _UNBRACKETED.match(line) and (after_blank or not in_brackets):
            in_direction = True
        elif not in_direction:
            spoken.append(_AT_THE_RIGHT.sub("", line))
        after_blank = _is_blank(line)
    roles: dict[str, list[str]] = {}
    for speaker, said in speeches:
        if text := _one_line(said):
            roles.setdefault(speaker, []).append(text)
    return roles


def _one_line(lines: Sequence[str]) -> str:
    text = " ".join(lines).replace(_MARK, " ").replace("_", "")
    return " ".join(text.split()).strip("[]{} ")


def _is_blank(line: str) -> bool:
    return not line.strip(" \t" + _MARK)


def _forms(lines: Sequence[str]) -> Iterator[_Begins]:
    """Find the beginnings of speeches as each form of edition would have them."""
    for capitals in (True, False):
        before = dict(_before_speech(lines, capitals))
        alone = dict(_alone(lines, capitals))
        if capitals:  # slips of an edition: no empty line, or the speech begins in the same one
            names = {speaker for speaker, _ in alone.values()}
            dotted = {i: (_speaker(line), "") for i, line in enumerate(lines) if line[-1:] == "."}
            alone |= {i: begin for i, begin in (dotted | before).items() if begin[0] in names}
        yield alone
        yield before


def _alone(lines: Sequence[str], capitals: bool) -> Iterator[tuple[int, tuple[str, str]]]:
    for index in range(1, len(lines) - 1):
        if _is_blank(lines[index - 1]) and lines[index + 1].strip():
            name = lines[index].strip(" \t" + _MARK)
            if (capitals or name.endswith((".", ":"))) and _is_name(name, capitals):
                yield index, (_speaker(name), "")


def _before_speech(lines: Sequence[str], capitals: bool) -> Iterator[tuple[int, tuple[str, str]]]:
    for index, line in enumerate(lines):
        found = _BEFORE_SPEECH.match(line)
        if found and (capitals or found[1]) and _is_name(found[2], capitals):
            yield index, (_speaker(found[2]), line[found.end() :])


def _is_name(text: str, capitals: bool) -> bool:
    """Return whether this may be a speaker's name, in capitals or not."""
    text = text.strip(" \t.:-" + _MARK)
    if len(text) > _MAX_NAME or not _NAME.fullmatch(text) or _NOBODY.match(text):
        return False
    words = [word for word in text.split() if word not in _SMALL_WORDS]
    if not words or any(word[0].islower() for word in words):
        return False
    if not capitals:
        return "," not in text
    letters = [letter for word in words for letter in word if letter.isalpha()]
    return 2 * sum(letter.isupper() for letter in letters) > max(len(letters), 2)


def _speaker(name: str) -> str:
    return " ".join(name.strip(" \t.:-" + _MARK).upper().split())
