"""Plays: who says what, in the forms that plain-text editions have."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.plays import Role, read_roles
from protocol.errors import DataError

PLAYS = Path(__file__).parents[2] / "data" / "shakespeare"

NAMES_ALONE = """\
*** START OF THE PROJECT GUTENBERG EBOOK THE BAKER OF PADUA ***

THE BAKER OF PADUA

by Nobody

PERSONS REPRESENTED.

THE DUKE OF PADUA.
LEANDRO, a Baker, in love with Bianca.
BIANCA, Daughter to the Duke.

SCENE,--Padua.

PROLOGUE

[Enter CHORUS.]

CHORUS.
Two ovens, both alike in dignity.

ACT I.

SCENE I. Padua. Before an oven,
and a door.

[Enter LEANDRO, carrying a loaf of
bread; BIANCA following.]

LEANDRO.
What bread is this? [Smells it.] It is not mine.

[BIANCA laughs.]

Come in the house, and see:
Enter the oven, and see if there be more.

Enter a MOUSE, and other
guests.

BIANCA.
[Aside.] He loves his bread. _So_ do I.
  Enter at noon; I'll sing:

SONG.

A loaf, a loaf, my kingdom for a loaf,

II.
And once again a loaf,

LEANDRO
Sing on, as
I
would.
BIANCA.
No.
LEANDRO. [Weeps.]
Alas!

BIANCA. A slip of the printer's, this.

DUKE OF PADUA.
[Within.] What ho!

DUKE OF PADUA.

[Within.]

What ho, I say!

LEANDRO and BIANCA.
The Duke!

[Exeunt

Scene II. The same.

LEANDRO.
Gone, {Kneeling.] gone.

THE END

*** END OF THE PROJECT GUTENBERG EBOOK THE BAKER OF PADUA ***

LICENSE.
You may copy it.
"""


def speeches(text: str, title: str = "baker") -> dict[str, tuple[str, ...]]:
    return {role.name: role.speeches for role in read_roles(text, title)}


def test_each_role_has_its_speeches_and_nothing_else_is_one() -> None:
    assert speeches(NAMES_ALONE) == {
        "CHORUS": ("Two ovens, both alike in dignity.",),
        "LEANDRO": (
            "What bread is this? It is not mine. Come in the house, and see: Enter the oven, and "
            "see if there be more.",
            "Sing on, as I would.",
            "Alas!",
            "Gone, gone.",
        ),
        "BIANCA": (
            "He loves his bread. So do I. Enter at noon; I'll sing:",
            "No.",
            "A slip of the printer's, this.",
        ),
        "DUKE OF PADUA": ("What ho!", "What ho, I say!"),
        "LEANDRO AND BIANCA": ("The Duke!",),
    }


def test_names_in_lower_case_stand_alone_too() -> None:
    text = """\
Dramatis Personae.

Leandro, a Baker.

ACT I.

Scene I. Padua.

Lea.
Good bread.

1 Baker.
Better bread. Farewell.

[Exit.]

Farewell then.

Lady Bia.
The best.
"""
    assert speeches(text) == {
        "LEA": ("Good bread.",),
        "1 BAKER": ("Better bread. Farewell. Farewell then.",),
        "LADY BIA": ("The best.",),
    }


def test_contents_casts_and_directions_of_today_s_editions_are_nobody_s_speech() -> None:
    text = """\
THE BAKER OF PADUA

Contents

ACT I
Scene I. Padua. Before an oven
Scene II. The same

Dramatis Person\u00e6

LEANDRO, a Baker
BIANCA
BAKERS
and Millers

SCENE: Padua.

ACT I

SCENE I. Padua. Before an oven.

 Enter Leandro and
 Bianca.

LEANDRO.
[_Aside._] Here\u2019s bread.

 [_Exit Bianca._]

Bread indeed.

SCENE II. The same.

BIANCA.
_Il pane!_
"""
    assert speeches(text) == {
        "LEANDRO": ("Here\u2019s bread. Bread indeed.",),
        "BIANCA": ("Il pane!",),
    }


def test_names_stand_before_speeches_of_which_the_rest_is_indented() -> None:
    text = """\
1594

THE BAKER OF PADUA

DRAMATIS PERSONAE

  LEANDRO, a baker
  BIANCA

<<THIS ELECTRONIC VERSION IS NOT
FOR SALE.>>

ACT I. SCENE 1.
Padua. A street

Enter LEANDRO and
BIANCA

  LEANDRO. Good bread
    to all.
  BIANCA. Better.                  Exit LEANDRO
    And best:
    KING of breads.
                                    Exeunt

  FIRST BAKER. So be it.

FINIS
"""
    assert speeches(text) == {
        "LEANDRO": ("Good bread to all.",),
        "BIANCA": ("Better. And best: KING of breads.",),
        "FIRST BAKER": ("So be it.",),
    }


def test_names_in_lower_case_stand_before_speeches_in_the_folio() -> None:
    text = """\
The Tragedie of Leandro

Actus Primus. Scoena Prima.

Enter Leandro and
Bianca.

  Lea. What's this bread?
  Bia. Nay answer me: Stand
and taste it

   Lea. Long liue the Loafe.
Exit Bianca.

And short liue I

   1. Dead am I

Actus Secundus.

Flourish. Enter Bianca.

  Bia. Alas.

Exeunt. Marching: after the which,
they rest.

FINIS. The Tragedie of Leandro.

The Names of all the Actors

  Leandro. A Baker.
"""
    assert speeches(text) == {
        "LEA": ("What's this bread?", "Long liue the Loafe. And short liue I"),
        "BIA": ("Nay answer me: Stand and taste it", "Alas."),
        "1": ("Dead am I",),
    }


def test_a_tab_or_a_colon_separates_a_name_from_its_speech() -> None:
    assert speeches("LEANDRO\tGood bread.\n\tAnd dear.\nBIANCA\tBetter.\n") == {
        "LEANDRO": ("Good bread. And dear.",),
        "BIANCA": ("Better.",),
    }
    assert speeches("\nFIRST BAKER:\nGood bread.\n\nALL:\nBetter.\n") == {
        "FIRST BAKER": ("Good bread.",),
        "ALL": ("Better.",),
    }


def test_roles_of_two_plays_are_two_even_in_one_file() -> None:
    one = "DRAMATIS PERSONAE\n\nKING\n\nACT I\n\nKING.\nI reign.\n\nTHE END\n\n"
    other = "THE SECOND PLAY\n\n" + one.replace("reign", "rain")

    assert read_roles(one + other, "works") == [
        Role(play="works 1", name="KING", speeches=("I reign.",)),
        Role(play="works 2", name="KING", speeches=("I rain.",)),
    ]
    assert [role.play for role in read_roles(one, "works")] == ["works"]


def test_lines_may_end_as_anywhere_and_begin_with_spaces() -> None:
    unix = speeches(NAMES_ALONE)
    assert speeches(NAMES_ALONE.replace("\n", "\r\n")) == unix
    assert speeches(NAMES_ALONE.replace("\n", "  \n")) == unix


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n\n",
        "I\n\nFrom fairest loaves we desire increase,\nThat thereby\n\nII\n\nWhen forty\nloaves\n",
        "DRAMATIS PERSONAE\n\nKING.\nA king.\n\nQUEEN.\nHis wife.\n",
        "ACT I\n\nSCENE I\n[Enter KING.]\n",
    ],
    ids=["nothing", "empty lines", "a poem", "a cast", "directions"],
)
def test_a_text_without_speeches_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="no speech is found: give each speaker's name"):
        read_roles(text, "poem")


LINES = st.sampled_from(["good bread", "and, sir, so dear!", "is it", "a king's loaf: take"])
SPOKEN = st.lists(LINES, min_size=1, max_size=3)


@given(
    play=st.lists(st.tuples(st.sampled_from(["Ann", "Bob", "First Lord"]), SPOKEN), min_size=1),
    capitals=st.booleans(),
    alone=st.booleans(),
)
def test_what_is_printed_is_read_in_every_form(
    play: list[tuple[str, list[str]]], capitals: bool, alone: bool
) -> None:
    printed = ["ACT I", ""]
    expected: dict[str, tuple[str, ...]] = {}
    for number, (name, lines) in enumerate(play):
        head = f"{name.upper() if capitals else name}."
        printed += ["", head, *lines] if alone else [f"  {head} {lines[0]}", *lines[1:]]
        if number % 3 == 0:
            printed += ["", "[Enter a baker,", "and others.]", ""]
        expected[name.upper()] = (*expected.get(name.upper(), ()), " ".join(lines))

    assert speeches("\n".join(printed)) == expected


@given(
    st.lists(
        st.sampled_from(
            ["HAM.", "Ham. I", "  Ham. I", "ACT I", "[", "]", "<<", "Enter", "", " ", "x"]
        )
        | st.text(max_size=9)
    ).map("\n".join)
)
def test_any_text_gives_speeches_or_a_data_error(text: str) -> None:
    with contextlib.suppress(DataError):
        roles = read_roles(text, "any")
        assert all(role.name and all(role.speeches) and role.speeches for role in roles)


@pytest.mark.parametrize(
    "piece", ["[", "[\n", "<<", " ", "\t", ". ", "\nHAM.\nx\n", "ACT I\n", "!"]
)
def test_the_time_taken_is_linear_in_the_text(piece: str) -> None:
    begun = time.perf_counter()
    with contextlib.suppress(DataError):
        read_roles(piece * (200_000 // len(piece)), "long")
    # A quadratic search would take hours; under a second is usual.
    assert time.perf_counter() - begun < 20


@pytest.mark.skipif(not PLAYS.is_dir(), reason="no plays in data/shakespeare: make shakespeare")
def test_the_real_plays_have_the_roles_that_one_knows() -> None:
    plays = {
        path.stem: read_roles(path.read_text("utf-8"), path.stem)
        for path in sorted(PLAYS.glob("*.txt"))
    }
    longest = {
        "hamlet": ["HAM", "KING", "POL"],
        "macbeth": ["MACBETH", "LADY MACBETH", "MALCOLM"],
        "twelfth_night": ["SIR TOBY", "VIOLA", "OLIVIA"],
        "henry_v": ["KING HENRY", "FLUELLEN", "CHORUS"],
        "midsummer_nights_dream": ["THESEUS", "HELENA", "OBERON"],
    }
    if not longest.keys() <= plays.keys():
        pytest.skip("data/shakespeare holds plays of the user's own")
    for play, expected in longest.items():
        by_length = sorted(plays[play], key=lambda role: -sum(map(len, role.speeches)))
        assert [role.name for role in by_length[:3]] == expected
        spoken = " ".join(speech for role in plays[play] for speech in role.speeches)
        assert not any(
            strange in spoken
            for strange in ("ACT ", "SCENE", "Scene ", "[", "Exeunt", "Gutenberg", "Shakespeare")
        )
        size = (PLAYS / f"{play}.txt").stat().st_size
        assert 0.8 < len(spoken) / size < 0.95
