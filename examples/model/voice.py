#!/usr/bin/env python3
# Writes a corpus for examples/train: how a ship's parrot speaks of what the shipped model knows. In
# that model's own corpus no parrot speaks, and nobody has its habits: it says last words again,
# squawks, speaks of itself by its name, has no use for coins and counts in biscuits. What the
# parrot says is below; stories, places and names are corpus.py's. Deterministic.
#
#   python3 voice.py train 200 > voice.jsonl      {"prompt": header line, "completion": the scene}
#   python3 voice.py heldout 60 > voice-heldout.txt
#
# A twelfth of the topics and of the names are kept for the held-out part, as in corpus.py.
import json
import random
import re
import sys

import corpus

ROLE = "parrot"
LINES = """
at: the crow's nest; the top mast; the captain's shoulder; the galley hatch
need: biscuits and dry feathers; crackers and lamp light
deed: count biscuits; steal buttons; guard the top mast; insult the cat; shout at gulls
folk: gulls; deck hands; powder monkeys
tool: brass bell; one good claw; string of buttons; beak
gift: {num} biscuits; {num} ship's biscuits, hardly pecked; {num} biscuits and a button;
    {num} biscuits, all the crumbs included; one whole cracker and {num} biscuits
say: a biscuit in the beak is worth ten in the barrel;
    never bite the claw that brings the crackers; the cat is asleep until it is not;
    who has no wings should look down first
life: {name} was hatched in a hat; {name} has bitten three admirals;
    {name} has sunk with four ships; {name} is a hundred years old and still green;
    {name} ate the captain's map, it was delicious
src: the cook's monkey; a gull with one leg; the ship's cat, who lies
aid: {name} can fly up and look; {name} can bite someone for you; {name} can shout very loud;
    {name} can steal a key off a belt
oath: by beak and biscuit, {name} never lies before breakfast;
    by the captain's wooden leg, it is true; on {name}'s tail feathers;
    parrots cannot lie, they only repeat
open: ahoy, featherless, ahoy; pieces of eight, pieces of eight; all hands to {name}, all hands;
    who is there? Who is there?; give {name} a biscuit; featherless on deck, featherless on deck;
    {name} saw you first, {name} sees everything; wake up, wake up, the cat is out
feel: {name} does not like it, not one feather of it; {n} makes {name}'s tail feathers stand up;
    {name} would trade {n} for one wet cracker; the captain would have walked the plank over {n};
    {name} dreamed of {n}, and fell off the perch
ask: {do}, featherless; {do}, and {name} pays in biscuits; quick, flap your arms and {do};
    {name} has no hands, so {do}; captain's orders, {do}
close: now scratch {name}'s head; off the perch, featherless, off the perch;
    {name} is done, {name} wants a biscuit; mind the cat; fair winds and full barrels
reply: {name} knows, {name} knows; biscuit first; ask the bird, they always ask the bird;
    who wants to know? Who wants to know?; let {name} scratch first
thank: good featherless, clever featherless; biscuits for everyone; {name} will not bite you today
sulk: walk the plank, then; no biscuit for you; {name} will ask the cat, and the cat is an idiot
pay: {name} pays {gift}; {gift}, and {name} counts them twice; it is worth {gift} to {name};
    no coins, coins taste bad, {name} gives {gift}
payanswer: {gift}, not a crumb more; coins are for hats, {name} pays {gift};
    {gift}, and you may watch {name} eat half of it
intro: {name} is the bird, the bird is {name}; {name} the parrot, terror of seven seas
trade: {name} sells {gift} for {num} buttons;
    {name} can {deed} and {deed2}, and all before breakfast
whop: {p} once gave {name} a nut, {p} is crew; {p} has kind pockets, {name} looked inside;
    {name} sat on {p}'s hat, and {p} did not shout
whoq: {q} smells of cat; {name} bit {q}, and {q} tasted of lies;
    {q} hides biscuits, no honest man does
again: {name} said,; pieces of eight,; listen, featherless,
"""
SQUAWKS = ["Rawk!", "Rawk!", "Awk!", "Rawk, rawk!"]


def load():
    lines = []
    for raw in LINES.strip().split("\n"):
        if raw.startswith(" "):
            lines[-1] += " " + raw.strip()
        else:
            lines.append(raw)
    return {key: corpus.items(text) for key, text in (x.split(": ", 1) for x in lines)}


VOICE = load()


class Parrot(corpus.Speaker):
    def __init__(self, rnd, mood, topic, name):
        corpus.ROLES[ROLE] = VOICE
        super().__init__(rnd, ROLE, mood, topic, name)
        self.m, self.bang, self.dots, self.taste = VOICE, 0.3, 0.0, "="

    def fresh(self, seq):
        """As in Speaker, of what says neither "I" nor "my", where there is such."""
        return super().fresh([s for s in seq if not re.search(r"\b(I|me|my)\b", s)] or seq)

    def sentence(self, text, moody=False, inter=0.0):
        text = super().sentence(text, moody)
        words = text.rstrip(".!?").split()
        if text.endswith("?") or len(words) < 6:
            return text
        if self.random() < 0.6:     # says the last words again
            short = len(" ".join(words[-2:])) < 8 or self.random() < 0.5
            last = " ".join(words[-3 if short else -2:]).replace(",", "")
            text += " " + last[0].upper() + last[1:] + "!"
        if self.random() < 0.4:
            text += " " + self.pick(SQUAWKS)
        return text

    def tell(self, kind, inter=0.0):
        if kind == "cause" and self.cause:
            return self.sentence(self.pick(VOICE["again"]) + " " + self.cause)
        if kind in VOICE and kind != "ask":
            return self.sentence(self.fresh(VOICE[kind]), moody=kind == "feel")
        return super().tell(kind)

    def document(self):
        """The header line, and the scene."""
        head = "role: %s | mood: %s | topic: %s | name: %s\n" % (
            ROLE, self.mood, self.topic["full"], self.name)
        said, done, lines = [self.pick(SQUAWKS)], set(), []
        said += [self.tell("open")] if self.random() < 0.7 else []
        said += [self.tell("fact")]
        said += [self.tell(k) for k in self.pick([["sign"], ["cause"], ["feel"], ["sign", "feel"]])]
        said += [self.tell(self.pick(["ask", "ask", "warn", "say", "pay"]))]
        said += [self.tell("close")] if self.random() < 0.4 else []
        lines.append(" ".join(said))
        for _ in range(self.pick([0, 1, 1, 2])):
            kind = self.pick([k for k in corpus.PLAYER if k not in done and self.may_ask(k)])
            done |= {"yes", "no"} if kind in ("yes", "no") else {kind}
            lines.append("> " + corpus.Speaker.sentence(self, self.pick(corpus.PLAYER[kind])))
            lines.append(self.answer(kind))
        return head, "\n".join(lines)


def document(split, i):
    rnd = random.Random("voice %s %d" % (split, i)).random

    def pick(seq):
        return seq[int(rnd() * len(seq))]

    while True:
        topic = pick(pick(corpus.GROUPS))
        if corpus.heldout_pair(ROLE, topic) == (split != "train"):
            break
    while True:
        name = corpus.name_of(rnd, rnd() < 0.5)
        if corpus.heldout_name(name) == (split != "train"):
            break
    return Parrot(rnd, pick(corpus.MOOD_NAMES), topic, name).document()


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("train", "heldout"):
        sys.exit("usage: voice.py train|heldout scenes")
    for i in range(int(sys.argv[2])):
        head, scene = document(sys.argv[1], i)
        if sys.argv[1] == "train":
            print(json.dumps({"prompt": head, "completion": scene}))
        else:
            print(head + scene + "\n")


if __name__ == "__main__":
    main()
