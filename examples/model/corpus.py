#!/usr/bin/env python3
# Writes the training text: lines spoken by game characters, one document per (role, mood, topic,
# name). The building blocks are in roles.txt, moods.txt, topics.txt and common.txt; this file is
# the grammar that joins them. Deterministic: document i of a split depends on nothing else.
#
#   python3 corpus.py train 120000 > train.txt       python3 corpus.py heldout 360 > heldout.txt
#
# A document:   role: R | mood: M | topic: T | name: N        (one field may be missing)
#               what N says                                  (two to six sentences)
#               > what the player answers                    (then N again, and so on)
# and an empty line. Held-out documents use role+topic pairs and names that training never sees.
import hashlib
import os
import random
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

# ---- data files -------------------------------------------------------------------------------


def blocks(name):
    """The '=' blocks of a data file as (head, [(key, text)]), '+' lines under the key '+'."""
    found = []
    with open(os.path.join(HERE, name), encoding="utf-8") as f:
        for raw in f:
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            if raw.startswith(" "):
                key, text = found[-1][1].pop()
                found[-1][1].append((key, text + " " + line))
            elif line.startswith("= "):
                found.append((line[2:], []))
            elif line.startswith("+ "):
                found[-1][1].append(("+", line[2:]))
            else:
                key, _, text = line.partition(":")
                found[-1][1].append((key, text.strip()))
    return found


def items(text):
    return [t.strip() for t in text.split(";")]


def load(name, plain=()):
    """{head: {key: items}}; the keys in `plain` hold words."""
    return {head: {key: text.split() if key in plain else items(text) for key, text in lines}
            for head, lines in blocks(name)}


IRREGULAR_ING = {"tie": "tying", "dye": "dyeing", "shoe": "shoeing"}
DOUBLED = set("dig set cut skin trim knit gut sit let skim scrub dip drag stir split prop tar "
              "distil label".split())


def ing(phrase):
    verb, _, rest = phrase.partition(" ")
    if verb in IRREGULAR_ING:
        verb = IRREGULAR_ING[verb]
    elif verb in DOUBLED:
        verb += verb[-1] + "ing"
    elif verb.endswith("e") and not verb.endswith("ee"):
        verb = verb[:-1] + "ing"
    else:
        verb += "ing"
    return (verb + " " + rest).strip()


def third(phrase):
    verb, _, rest = phrase.partition(" ")
    if verb.endswith(("s", "sh", "ch", "x", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ies"
    else:
        verb += "s"
    return (verb + " " + rest).strip()


def open_nouns(fam):
    """The nouns of a family that are combined here instead of written out, with '*' for an
    attribute drawn anew in each document: such topics cannot be known by heart."""
    out = []
    for line in fam.pop("plain", []):
        words, _, only = line.partition(" > ")
        for word in items(words):
            for adjective in fam.get("adjective", [""]):
                out.append("%s > %s | * | *" % ((adjective + " " + word).strip(), only))
    if fam.pop("people", None):
        for role, r in ROLES.items():
            for pron, its in (("he", "his "), ("she", "her ")):
                for deed, tool in zip(r["deed"], r["tool"]):
                    out.append("%s | %s | %s | %s" % (role, third(deed), its + tool, pron))
    return out


def load_topics():
    """Families by name, and all topics: header text, short form, pronoun, attributes, stories."""
    families, topics = {}, []
    for head, lines in blocks("topics.txt"):
        fam = families[head] = {"stories": {}}
        frames, nouns, into = [], [], fam
        for key, text in lines:
            if key == "+":
                into = fam["stories"][text] = {}
            elif key == "frame":
                frames.append(text)
            elif key == "noun":
                nouns.append((text, False))
            elif key == "plain":
                fam.setdefault("plain", []).append(text)
            else:
                into[key] = items(text)
        nouns += [(text, True) for text in open_nouns(fam)]
        for frame in frames:
            frame, _, own = frame.partition("@")
            short, pron = [x.strip() for x in own.split("|")] if own else ("the $", None)
            text, stories = [x.strip() for x in frame.split(">")]
            for noun, is_open in nouns:
                cells = [c.strip() for c in noun.split("|")] + [""] * 3
                word, _, only = cells[0].partition(" > ")
                told = [s for s in stories.split() if not only or s in only.split()]
                if told:
                    topics.append({
                        "full": text.replace("$", word), "short": short.replace("$", word),
                        "noun": word, "stories": told, "family": head, "open": is_open,
                        "pron": pron or cells[3] or "it", "many": cells[3] == "they",
                        "a": cells[1], "b": cells[2]})
    return families, topics


def props(families):
    """For each line that speaks of "the glove" or "that glove": the things ("a glove") that another
    line of its story brings in, and that must have been mentioned before."""
    brings = re.compile(r"\b(?:a|an|some|\{num\}|two|three) ((?:[\w-]+ ){0,2}[\w-]+)")
    speaks = re.compile(r"\b(?:the|that|those) (\w+)(?: (\w+))?")
    needs = {}
    for fam in families.values():
        for story in fam["stories"].values():
            lines = [t for key in story for t in story[key]]
            brought = {}
            for line in lines:
                for found in brings.findall(line):
                    for word in found.split():
                        if len(word) > 2 and word not in WORLD["known"]:
                            brought.setdefault(word, set()).add(line)
            for line in lines:
                spoken = {w for pair in speaks.findall(line) for w in pair} & set(brought)
                needs[line] = {w for w in spoken if line not in brought[w]}
    return needs


ROLES = load("roles.txt")
MOODS = load("moods.txt", ("style",))
COMMON = load("common.txt", """starts ends_f ends_m onsets vowels female male town_a town_b jobs
                               women_only men_only numbers known""".split())
WORLD, FRAMES, PLAYER = COMMON["world"], COMMON["frames"], COMMON["player"]
SUSPECTS = [s.split("|") for s in WORLD["suspects"]]
WHENS = [w.split("|") for w in WORLD["whens"]]
CODAS = [""] * 8 + ["n", "r", "l", "s", "th", "m", "k", "d", "nd", "rn", "x"]
FAMILIES, TOPICS = load_topics()
NEEDS = props(FAMILIES)
ROLE_NAMES, MOOD_NAMES = list(ROLES), list(MOODS)
TURNS = [0] * 29 + [1] * 11 + [2] * 5 + [3] * 3 + [5, 7]  # player lines in a document
PLANS = [p.split() for p in """sign;cause;effect;feel;sign cause;sign feel;effect feel;
    cause effect;sign effect;old effect;rumour feel;src sign;old cause;cause say;effect say;
    life feel;sign rumour;fear cause;oath sign;feel cause""".split(";")]

# ---- one document -----------------------------------------------------------------------------

PARSED = {}


def parse(text):
    """Template text as a list of strings, (slot,) tuples and lists of alternatives."""
    if text not in PARSED:
        PARSED[text] = [
            (piece[1:-1],) if piece[0] == "{" else
            [parse(p) for p in piece[1:-1].split("|")] if piece[0] == "[" else piece
            for piece in re.findall(r"\{\w+\}|\[[^\]]*\]|[^{\[]+", text)]
    return PARSED[text]


class Speaker:
    """The fixed choices of a document (who, where, when, why) and what has been said so far."""

    def __init__(self, rnd, role, mood, topic, name):
        self.random = rnd
        self.role, self.mood, self.topic, self.name = role, mood, topic, name
        self.r, self.m = ROLES[role], MOODS[mood]
        bang, dots, low, high, self.taste = self.m["style"]
        self.bang, self.dots, self.low, self.high = float(bang), float(dots), int(low), int(high)
        self.family = FAMILIES[topic["family"]]
        self.story = self.family["stories"][self.pick(topic["stories"])]
        self.used, self.said_p, self.said_q, self.asked = set(), False, False, False
        self.a = self.pick(self.family["places"]) if topic["a"] == "*" else topic["a"]
        self.b = self.pick(self.family["marks"]) if topic["b"] == "*" else topic["b"]
        self.cause, self.said = None, topic["full"] + " " + self.a
        self.town = self.pick(WORLD["town_a"]) + self.pick(WORLD["town_b"])
        head = set(re.findall(r"\w{4,}", topic["full"]))
        while True:
            self.place = self.pick(WORLD["places"])
            if not head & set(self.place.split()) and self.place not in self.r["at"]:
                break
        self.at = self.pick(self.r["at"])
        self.when, self.since = self.pick(WHENS)
        self.q, self.qshort = self.pick(SUSPECTS)
        # The neighbour differs in pronoun from a person topic, so that "he" and "she" stay clear.
        woman = {"he": True, "she": False}.get(topic["pron"])
        if woman is None:
            woman = self.random() < 0.5
        self.he, self.him, self.his = ("she", "her", "her") if woman else ("he", "him", "his")
        while True:
            self.pshort = name_of(self.random, woman)
            if self.pshort != name and not heldout_name(self.pshort):
                break
        self.p = self.person(woman)
        coins = ["silver", "silver coins", "gold pieces", "coppers"]
        coin = self.pick(WORLD["numbers"]) + " " + self.pick(coins)
        gift = self.pick(self.r["gift"])
        self.pay = self.pick([gift, gift, gift, coin, coin + " and " + gift])

    def person(self, woman):
        n = self.pshort
        while True:
            job = self.pick(WORLD["jobs"])
            if job not in WORLD["men_only" if woman else "women_only"] and \
                    job not in self.topic["full"] and job not in self.role:
                break
        return self.pick([
            n + " the " + job, n + " the " + job, n + " the " + job, "old " + n, "young " + n,
            "my cousin " + n, "my neighbour " + n, "my " + ("sister " if woman else "brother ") + n,
            "my friend " + n, "the " + job + "'s " + ("daughter " if woman else "son ") + n,
            n + " from next door",
            n + " from " + self.pick(WORLD["town_a"]) + self.pick(WORLD["town_b"])])

    def pick(self, seq):
        return seq[int(self.random() * len(seq))]

    def fresh(self, seq):
        """A choice not used before in this document, by the mood's taste for short or long."""
        left = [s for s in seq if s not in self.used] or seq
        left = [s for s in left if all(w in self.said for w in NEEDS.get(s, ()))] or left
        one = self.pick(left)
        if self.taste != "=" and len(left) > 2 and self.random() < 0.6:
            two = self.pick(left)
            one = min(one, two, key=len) if self.taste == "-" else max(one, two, key=len)
        self.used.add(one)
        return one

    def slot(self, key, moody):
        t = self.topic
        if key in ("p", "he", "him"):
            if self.said_p:
                return self.pshort if key == "p" else getattr(self, key)
            self.said_p = True
            return self.p
        if key == "his":
            return self.his if self.said_p else self.slot("p", moody) + "'s"
        if key == "q":
            first, self.said_q = not self.said_q, True
            return self.q if first else self.qshort
        if key in ("n", "t"):
            if not moody:
                return t["full"] if key == "t" else t["short"]
            if t["pron"] == "it" and t["family"] != "beast":
                return t["short"]
            return self.pick(["the business with ", "the matter of "]) + t["short"]
        if key == "it":
            return t["pron"]
        if key == "obj":
            return {"they": "them", "he": "him", "she": "her"}.get(t["pron"], "it")
        if key == "its":
            return {"they": "their", "he": "his", "she": "her"}.get(t["pron"], "its")
        if key in ("is", "was", "has", "s"):
            plural = {"is": "are", "was": "were", "has": "have", "s": ""}
            return plural[key] if t["pron"] == "they" else key
        if key == "g":
            return t["noun"]
        if key == "gis":
            return "are" if t["many"] else "is"
        if key == "num":
            return self.pick(WORLD["numbers"][:12])
        if key == "deeding":
            return ing(self.pick(self.r["deed"]))
        if key == "deeds":
            return third(self.pick(self.r["deed"]))
        if key == "deed2":
            return self.fresh(self.r["deed"])
        if key == "do":
            return self.fill(self.fresh(self.story["ask"]))
        if key in self.r and key != "at":
            return self.fill(self.fresh(self.r[key]))
        return getattr(self, key)

    def fill(self, text, moody=False):
        return self.join(parse(text), moody)

    def join(self, parts, moody):
        return "".join(p if isinstance(p, str) else self.slot(p[0], moody) if isinstance(p, tuple)
                       else self.join(self.pick(p), moody) for p in parts)

    def sentence(self, text, moody=False, inter=0.0):
        article = "{role}" in text
        text = self.fill(text, moody)
        if article:
            text = re.sub(r"\ba(?= [aeiou])", "an", text)
        if inter and self.random() < inter:
            lead = self.pick(self.m["inter"])
            if text.split()[:2] != lead.strip(",").split()[:2] and \
                    not text.startswith(("remember", "between us")):
                text = lead + " " + text
        self.said += " " + text
        text = re.sub(r"(^|[.?!] )([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)
        if text[-1] in "?!.":
            return text
        roll = self.random()
        return text + ("!" if roll < self.bang else "..." if roll < self.bang + self.dots else ".")

    def tell(self, kind, inter=0.0):
        """A sentence of a kind, from the story, the family, the mood or the shared frames."""
        if kind == "cause":
            # One cause per story: asked again, it is told again.
            if self.cause:
                return self.sentence(self.pick(FRAMES["again"]) + " " + self.cause)
            self.cause = self.fill(self.fresh(self.story["cause"]))
            return self.sentence(self.cause, inter=inter)
        if kind in self.story and kind != "ask":
            return self.sentence(self.fresh(self.story[kind]), inter=inter)
        if kind in ("effect", "old", "rumour", "where"):
            return self.sentence(self.fresh(self.family[kind]), inter=0 if kind == "old" else inter)
        if kind == "ask":
            self.asked = True
            return self.sentence(self.fresh(self.m["ask"]))
        if kind in self.m:
            return self.sentence(self.fresh(self.m[kind]), moody=True)
        return self.sentence(self.fresh(FRAMES[kind]))

    def speech(self):
        r = self.random
        out = []
        if r() < 0.62:
            out.append(self.tell("open"))
        if r() < 0.16:
            out.append(self.tell("intro"))
        out.append(self.tell("fact", 0.25 if out else 0.1))
        plan = self.pick([p for p in PLANS if self.low <= len(p) <= self.high
                          and (len(p) == 1 or r() < 0.4)])
        out += [self.tell(kind, 0.22) for kind in plan]
        end = r()
        if end < 0.5:
            out.append(self.tell("ask"))
            if r() < 0.38:
                out.append(self.tell(self.pick(["pay", "pay", "aid", "warn"])))
        elif end < 0.68:
            out.append(self.tell("warn", 0.15))
        elif end < 0.76:
            out.append(self.tell("aid"))
        elif end < 0.82:
            out.append(self.tell("oath"))
        if r() < 0.36:
            out.append(self.tell("close"))
        return " ".join(out)

    def answer(self, kind):
        if kind == "bye":
            return self.tell("close") if self.random() < 0.7 else \
                self.tell("warn") + " " + self.tell("close")
        if kind == "yes":
            out = [self.tell("thank"), self.tell("next", 0.1)]
            if self.random() < 0.3:
                out.append(self.tell(self.pick(["aid", "pay", "warn"])))
            return " ".join(out)
        if kind == "no":
            out = [self.tell("sulk")]
            if self.random() < 0.5:
                out.append(self.tell(self.pick(["feel", "pay", "oath"])))
            return " ".join(out)
        out = [self.tell("reply")] if self.random() < 0.5 else []
        if kind == "pay":
            out.append(self.tell("payanswer"))
        elif kind == "howhelp":
            out.append(self.tell("ask"))
            if self.random() < 0.5:
                out.append(self.tell("pay"))
        elif kind == "life":
            out += [self.tell("intro"), self.tell("life")]
        else:
            out.append(self.tell(kind, 0.12))
            if self.random() < 0.35:
                out.append(self.tell(self.pick(["feel", "warn", "where", "say", "effect"])))
        if self.random() < 0.18:
            out.append(self.tell("close"))
        return " ".join(out)

    def may_ask(self, kind):
        """Whether the player can say such a thing by now."""
        return {"whop": self.said_p, "whoq": self.said_q, "bye": False, "howhelp": not self.asked,
                "yes": self.asked, "no": self.asked, "pay": self.asked}.get(kind, True)

    def document(self):
        fields = ["role: " + self.role, "mood: " + self.mood, "topic: " + self.topic["full"],
                  "name: " + self.name]
        if self.random() < 0.06:
            del fields[1 + int(self.random() * 3)]
        lines = [" | ".join(fields), self.speech()]
        turns = self.pick(TURNS)
        done = set()
        for i in range(turns):
            kinds = [k for k in PLAYER if k not in done and self.may_ask(k)]
            last = i and i == turns - 1 and self.random() < 0.3
            kind = "bye" if last else self.pick(kinds)
            done |= {"yes", "no"} if kind in ("yes", "no") else {kind}
            lines.append("> " + self.sentence(self.pick(PLAYER[kind])))
            lines.append(self.answer(kind))
        return "\n".join(lines) + "\n"


def name_of(rnd, woman):
    def pick(seq):
        return seq[int(rnd() * len(seq))]

    roll = rnd()
    if roll > 0.7:
        name = ""
        for _ in range(2 + int(rnd() * 1.5)):
            name += pick(WORLD["onsets"]) + pick(WORLD["vowels"]) + pick(CODAS)
        return name[:9].capitalize()
    if roll < 0.3:
        return pick(WORLD["female" if woman else "male"])
    return pick(WORLD["starts"]) + pick(WORLD["ends_f" if woman else "ends_m"])


# ---- splits -----------------------------------------------------------------------------------

KEPT = {}


def kept(text):
    """True for a fixed pseudo-random twelfth of all texts: those kept out of training."""
    if text not in KEPT:
        KEPT[text] = hashlib.sha256(text.encode()).digest()[0] % 12 == 0
    return KEPT[text]


def heldout_name(name):
    return kept("name " + name)


def heldout_pair(role, topic):
    return kept(role + " + " + topic["full"])


# Families are drawn evenly, written and combined nouns apart; inside, every topic is as likely.
GROUPS = [[t for t in TOPICS if t["family"] == f and t["open"] == o]
          for o in (False, True) for f in FAMILIES]
GROUPS = [g for g in GROUPS if g]


def document(split, i):
    """Document i of split 'train' or 'heldout'."""
    rnd = random.Random("%s %d" % (split, i)).random

    def pick(seq):
        return seq[int(rnd() * len(seq))]

    want = split != "train"
    while True:
        role, topic = pick(ROLE_NAMES), pick(pick(GROUPS))
        if heldout_pair(role, topic) == want:
            break
    while True:
        name = name_of(rnd, rnd() < 0.5)
        if heldout_name(name) == want:
            break
    return Speaker(rnd, role, pick(MOOD_NAMES), topic, name).document()


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("train", "heldout"):
        sys.exit("usage: corpus.py train|heldout documents")
    for i in range(int(sys.argv[2])):
        sys.stdout.write(document(sys.argv[1], i) + "\n")


if __name__ == "__main__":
    main()
