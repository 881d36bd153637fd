"""What is filmed when nothing else is said: prompts to measure on, and one apart from them to set levers up with."""

from __future__ import annotations

from undercrank.records import Family

TOY = (
    "a red ring moves left on a navy background",
    "a large blue square grows on a sand background",
    "a small green triangle falls on a striped gray background",
    "a yellow circle bounces on a black background",
    "a purple star spins on a checkered sand background",
    "an orange cross rises on a green field",
    "a cyan disc slides right on a navy background",
    "a white hoop shrinks on a black background",
    "a large red star moves right on a checkered gray background",
    "a small yellow square rises on a striped navy background",
    "a blue ball falls on a sand background",
    "a green plus stays still on a black background",
)
FILMED = (
    "a red fox runs through deep snow, low sun behind the trees",
    "an old fisherman mends a net on a pier, close up of his hands",
    "rain on a neon street at night, people with umbrellas walk past",
    "a hot-air balloon rises over a misty valley, seen from above",
)
SEARCHED_ON = {
    True: (
        "a small purple cross slides left on a gray background",
        "a large white triangle bounces on a green field",
        "a cyan square falls on a checkered navy background",
        "a green star grows on a black background",
        "a red disc rises on a striped gray background",
        "a yellow hoop stays still on a sand background",
        "a blue plus shrinks on a navy background",
        "a large orange ball moves right on a black background",
    ),
    False: (
        "a woman in a yellow coat waits at a tram stop, snow falls",
        "waves break on black rocks, slow motion, from a low angle",
        "a cook slices tomatoes on a wooden board, close up",
        "a steam train crosses a stone bridge in autumn",
    ),
}
"Films that schedules are searched on; none of them is among those that a lever is judged by."
SET_UP = {
    True: "an orange ring spins on a striped sand background",
    False: "a dog shakes water from its fur in a garden",
}
SET_UP_SEED = 9001
"No seed that a person is likely to type: runs that set a lever up must not be among the films that it is judged by."


def prompts_for(family: Family, count: int) -> tuple[str, ...]:
    """The first `count` prompts in the model's own domain."""
    return (TOY if "toy_domain" in family.traits else FILMED)[:count]


def searched_on(family: Family, count: int) -> tuple[str, ...]:
    """At most so many prompts to search schedules on."""
    return SEARCHED_ON["toy_domain" in family.traits][:count]


def set_up_prompt(family: Family) -> str:
    return SET_UP["toy_domain" in family.traits]
