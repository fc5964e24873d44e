#!/usr/bin/env python3
# Writes the training text: lines spoken by game characters, one document per (role, mood, topic, name).
# The building blocks are in roles.txt, moods.txt and topics.txt; this file is the grammar that joins them.
# Deterministic: document i of a split depends on nothing but the split's name and i.
#
#   python3 corpus.py train 120000 > train.txt       python3 corpus.py heldout 400 > heldout.txt
#
# A document:   role: R | mood: M | topic: T | name: N        (one field may be missing)
#               what N says                                  (two to six sentences)
#               > what the player answers                    (then N again, and so on)
# and an empty line. Held-out documents use role+topic pairs and names that never occur in training.
import hashlib
import os
import random
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
VOWELS = "aeiou"


def blocks(name):
    """The '=' blocks of a data file as (head, [(mark, text)]) in file order."""
    found = []
    with open(os.path.join(HERE, name), encoding="utf-8") as f:
        for line in f:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if line.startswith("= "):
                found.append((line[2:], []))
            elif line.startswith("+ "):
                found[-1][1].append(("+", line[2:]))
            else:
                key, text = line.split(": ", 1) if ": " in line else (line.rstrip(":"), "")
                found[-1][1].append((key, text))
    return found


IRREGULAR_ING = {"tie": "tying", "dye": "dyeing", "shoe": "shoeing"}
DOUBLED = set("""dig set cut skin trim knit gut sit let skim scrub dip drag stir split prop tar distil label""".split())


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
    elif verb.endswith("y") and verb[-2] not in VOWELS:
        verb = verb[:-1] + "ies"
    else:
        verb += "s"
    return (verb + " " + rest).strip()


def items(text):
    return [" ".join(t.split()) for t in text.split(";") if t.strip()]


def load_simple(name):
    table = {}
    for head, lines in blocks(name):
        table[head] = {key: items(text) if key != "style" else text.split() for key, text in lines}
    return table


def open_nouns(head, fam):
    """The nouns of a family that are combined here instead of written out, with '*' for an attribute that
    is drawn anew in each document: a model must copy such a topic, it cannot know it by heart."""
    out = []
    for line in fam.pop("plain", []):
        words, _, only = line.partition(" > ")
        for word in items(words):
            for adjective in fam["adjective"] if "adjective" in fam else [""]:
                out.append("%s > %s | * | *" % ((adjective + " " + word).strip(), only))
    if fam.pop("people", None):
        for role, r in ROLES.items():
            for pron, its in (("he", "his "), ("she", "her ")):
                for deed, tool in zip(r["deed"], r["tool"]):
                    out.append("%s | %s | %s | %s" % (role, third(deed), its + tool, pron))
    return out


def load_topics():
    """Topic records: header text, short form, pronoun, attributes, family, story names."""
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
                nouns.append(text)
            elif key == "plain":
                fam.setdefault("plain", []).append(text)
            else:
                into[key] = items(text)
        extra = open_nouns(head, fam)
        for frame in frames:
            short = pron = None
            if "@" in frame:
                frame, rest = frame.split("@")
                short, pron = [x.strip() for x in rest.split("|")]
            text, stories = [x.strip() for x in frame.split(">")]
            for noun in nouns + extra:
                cells = [c.strip() for c in noun.split("|")]
                word, _, only = cells[0].partition(" > ")
                told = [s for s in stories.split() if not only or s in only.split()]
                if not told:
                    continue
                last = cells[3] if len(cells) > 3 else ""
                full = "the " + text[4:].replace("$", word)
                topics.append({
                    "full": full, "noun": word, "stories": told, "family": head, "open": noun in extra,
                    "short": (short.replace("$", word) if short else "the " + word),
                    "pron": pron or last or "it", "many": last == "they",
                    "a": cells[1] if len(cells) > 1 else "", "b": cells[2] if len(cells) > 2 else ""})
    return families, topics


def props(families):
    """For each line that speaks of "the glove" or "that glove": the things ("a glove") that another line
    of its story brings in, and that must have been mentioned before."""
    needs = {}
    for fam in families.values():
        for story in fam["stories"].values():
            lines = [t for key in story for t in story[key]]
            brought = {}
            for line in lines:
                for found in re.findall(r"\b(?:a|an|some|\{num\}|two|three) ((?:[\w-]+ ){0,2}[\w-]+)", line):
                    for word in found.split():
                        if len(word) > 2 and word not in COMMON_WORDS:
                            brought.setdefault(word, set()).add(line)
            for line in lines:
                spoken = re.findall(r"\b(?:the|that|those) (\w+)(?: (\w+))?", line)
                words = {w for pair in spoken for w in pair} & set(brought)
                needs[line] = {w for w in words if line not in brought[w]}
    return needs


# Words that everyone knows without being told: they bring nothing into a story.
COMMON_WORDS = set("""road door house wall night town river yard wood water fire day time council way part bed boat window
market floor gate table side end head name one man woman witch king old small big new good watch word judge duke
guild army crowd dark village and who fell the would with near was for from half empty seal price dead place young
well priest joke sold whole""".split())
ROLES = load_simple("roles.txt")
MOODS = load_simple("moods.txt")
FAMILIES, TOPICS = load_topics()
NEEDS = props(FAMILIES)
ROLE_NAMES, MOOD_NAMES = list(ROLES), list(MOODS)

# ---- people, towns, places, times -------------------------------------------------------------

STARTS = """Al An Ar Bel Ber Bran Cal Cor Dal Dor Ed El Em Fen Gar Gil Hal Hel Il Is Jor Kel Kor Lan Lin
Lor Mar Mer Mor Nel Nor Ol Or Os Per Ral Ran Rin Ros Sal Sel Sig Tal Tam Tor Ul Val Ver Wil Wyn Yor Zel""".split()
ENDS_F = "a la wen ina ia eth issa una ora ild na ys ra anne ette".split()
ENDS_M = "an ric in o ald us en mond bert ik ar or win as dan gar".split()
FEMALE = """Orla Mira Hesk Tilda Agnes Bryn Clara Dora Edda Freya Greta Hilda Ines Jana Kaja Lotte Maud Nessa
Olga Petra Rosa Runa Signe Thea Ursa Vera Wanda Ylva Zora Ada Bess Cora Dinah Elsa Flora Gwen Holly Ida Joan
Kate Lena Molly Nora Opal Pearl Quilla Ruth Sadie Tess Una Viola Willa Alma Birgit Celia Delia Esme Fern Gerda
Hanna Ivy Jutta Kira Liesel Mabel Nina Odile Philippa Ragna Sunniva Trudy Vesna Winnie Astrid Beatrix Cressida
Dagny Elke Frieda Gudrun Heather Imke Juniper Katrin Lavender Marigold Nettie Poppy Rowena Saskia Thyra""".split()
MALE = """Tam Bram Odo Piet Jory Aldo Benno Casper Dirk Egon Falk Gustav Hob Ivo Jasper Klaus Lars Magnus Nils
Oswin Pim Quentin Rolf Sven Till Ugo Viktor Wat Yannick Abel Boris Cuthbert Dunstan Edgar Finn Gregor Hugo
Ingo Joss Kurt Leif Milo Ned Otto Pascal Rufus Silas Tobias Udo Vincent Walter Axel Bartel Conrad Drogo Emil
Fergus Godric Harald Isidor Jonas Kaspar Linus Morten Norbert Oskar Percy Ragnar Simon Thorben Ulf Volker
Wendel Anselm Barnaby Clovis Desmond Eamon Florian Giles Humphrey Ivar Jarl Knut Lambert Matthias Niklas""".split()
TOWN_A = """Ash Black Bram Brook Cold Crow Dun East Elm Fal Fern Fox Glen Gold Green Grim Hart Hazel High Holl
Iron Kings Lang Lark Low Maple Marl Mill Moss Nether North Oak Old Otter Raven Red Rook Salt Sedge Silver Stone
Stork Swan Thorn Under Wester White Willow Winter Wolf Wych""".split()
TOWN_B = """ford ham ton bridge field mere dale wick haven moor bury hollow stead gate cross water combe""".split()
ONSETS = "b br c d dr f g gr h j k l m n p r s sh st t th tr v w z".split()
VOCALS = "a e i o u a e i o ae ia ei".split()
CODAS = ["", "", "", "", "", "", "", "", "n", "r", "l", "s", "th", "m", "k", "d", "nd", "rn", "x"]
JOBS = """ferryman miller baker cooper weaver tanner potter shepherd fisher carter groom cobbler brewer glazier
thatcher drover clerk cook gardener hunter mason joiner dyer chandler saddler roper bell-ringer lamplighter
herring-seller goatherd piper woodman wheelwright tinker basket-maker bookbinder barber schoolmaster
egg-seller sexton porter chimney-sweep milkmaid seamstress washerwoman glover hatter""".split()
WOMEN_ONLY = {"milkmaid", "seamstress", "washerwoman"}
MEN_ONLY = {"ferryman", "woodman", "schoolmaster"}
SUSPECTS = """a stranger in a green cloak|the stranger;the steward's nephew|the nephew;a man with a silver tooth|the man
with the silver tooth;the new clerk|the new clerk;a widow from the coast|the widow from the coast;the duke's
cousin|the duke's cousin;a merchant with too many rings|the merchant;the one-armed captain|the one-armed captain;
a horse dealer from the east|the horse dealer;the tall sisters|the tall sister;a painter nobody hired|the painter;
the money changer|the money changer;a soldier without a flag|the soldier;the alderman's son|the alderman's son;
a monk with dirty boots|the monk;the man from the salt company|the salt man;a woman with a raven|the raven woman;
the young baron|the young baron;a doctor without a licence|the doctor;the toll keeper's brother|the toll keeper's
brother;a singer from the south|the singer;the owner of the red inn|the owner of the red inn;a lawyer in yellow
gloves|the lawyer;the head of the weavers|the head of the weavers;a sailor with no ship|the sailor;the bishop's
secretary|the secretary;a man who calls himself a prince|the prince;the grain dealer|the grain dealer;a juggler with
cold eyes|the juggler;the lord's gamekeeper|the gamekeeper;a fat man on a thin mule|the fat man;the chief
collector|the chief collector;a pedlar of mirrors|the mirror pedlar;the schoolmaster's wife|the schoolmaster's wife;a
smith from over the hills|the smith from over the hills;the old general|the old general""".replace("\n", " ")
SUSPECTS = [s.strip().split("|") for s in SUSPECTS.replace("the tall sisters", "the taller sister").split(";")]
PLACES = """the old mill;the ford;the crossroads;the north gate;the chapel on the hill;the willow pond;the market
square;the stone bridge;the gallows tree;the fish market;the lime kiln;the dead oak;the river bend;the toll house;
the three wells;the shepherd's hut;the quarry;the ruined wall;the boat landing;the broken milestone;the rope yard;
the south meadow;the fox wood;the mill race;the abbey wall;the eel pond;the burnt inn;the sheep bridge;the saw pit;
the hunter's stone;the bell tower;the east road;the charcoal pits;the washing place;the hollow lane;the hay market;
the upper spring;the bear cave;the vineyard wall;the weir;the pilgrim's cross;the old barracks;the salt steps;the
gravel bank;the lepers' gate;the widow's walk;the crooked bridge;the alder swamp;the dry fountain;the tithe barn;
the bowling green;the harbour stairs;the cattle ford;the wind gap;the monk's path;the blue door;the dye works;the
archery field;the last house;the beacon hill;the plum orchard;the tannery ditch;the covered well;the long stair;
the pump in the yard;the wolf pit;the ice cellar;the lookout rock;the drowned meadow;the stork's nest;the hop
garden;the potter's field""".replace("\n", " ")
PLACES = items(PLACES)
WHENS = """last night|since last night;three nights ago|for three nights now;on market day|since market day;a week
ago|for a week now;two weeks ago|for two weeks now;at the new moon|since the new moon;in the first frost|since the
first frost;the day before yesterday|for two days now;in the spring|since the spring;on the night of the
storm|since the night of the storm;at harvest time|since harvest time;last month|since last month;yesterday at
dusk|since yesterday;just before dawn|since dawn;ten days ago|for ten days now;when the moon was full|since the
full moon;after the last fair|since the last fair;on the first of the month|since the first of the month;a fortnight
ago|for a fortnight now;at the turn of the tide|since the last tide;on the shortest day|since the shortest day;
four nights ago|for four nights now;during the evening bell|since that evening;in the early hours|since this
morning;the night before last|for two nights now;last winter|since last winter""".replace("\n", " ")
WHENS = [w.strip().split("|") for w in WHENS.split(";")]
NUMBERS = "three four five six seven eight nine ten eleven twelve fourteen fifteen twenty thirty forty".split()

# ---- frames that any role, mood and family share ----------------------------------------------

COMMON = {key: items(text.replace("\n", " ")) for key, text in {
"intro": """{name} is the name; they call me {name}; I am {name}, the {role} of {town}; ask anyone in {town} for {name};
 you are talking to {name}, {role} for many a year; my name is {name}, and I {deed} for a living; {name}, the {role},
 that is me; people here know me as {name}""",
"pay": """I [will|can] give you {pay} for it; there is {pay} in it for you; do it, and you shall have {pay}; I offer
 {pay}, and my thanks; you will not do it for nothing, I offer {pay}; bring it off, and {pay} will be waiting at {at};
 {pay}, that is what it is worth to me; I have {pay} put aside for whoever does it; my reward is {pay}""",
"payanswer": """{pay}, and not a copper [more|less]; I said {pay}, and I keep my word; {pay}, as soon as it is done;
 you get {pay}, you have my word on it; {pay}, payable at {at}; it is worth {pay} to me, and that is no small thing;
 I will put {pay} into your hand myself; half now and half after, {pay} in all""",
"aid": """before you go, I can {aid}; if it helps, I will {aid}; come by {at}, and I will {aid}; I may be only
 [a simple|an honest] {role}, but I can {aid}; I will {aid}, that much I can do; a {role} has ways, I could {aid}; if you need
 help, I will {aid}""",
"say": """as we say at {at}, {say}; {say}, that is what I always say; you know what they say: {say}; I live by one rule:
 {say}; it is an old rule at {at}: {say}; my mother taught me one thing: {say}; remember: {say}""",
"life": "{life}; {life}; {life}, so I know what I am talking about; {life}, and still I {deed} every day",
"src": """I have it from {src}; {src} told me so; {src} said the same, word for word; I heard it first from {src};
 at first it was only talk from {src}; {src} saw it too""",
"oath": """{oath}, it is the truth; {oath}, I will not rest until this is over; {oath}, I mean every word; I swear it,
 {oath}; {oath}, I have never lied to a guest at {at}; {oath}, somebody will answer for it""",
"fear": """it frightens me more than {fear}; I would rather face {fear} than see this go on; there is only one thing
 worse, {fear}; next to this, even {fear} is a small worry; you know how I feel about {fear}, and this is worse""",
"trade": """I {deed} and I {deed2}, that is my trade; here at {at} you can get {gift}, if the price is right; look
 around {at}, all honest work; if you need someone to {deed}, I am the one; mostly I {deed}, and on quiet days I
 {deed2}; I could offer you {gift}; the {folk} come to {at}, and I {deed} for them""",
"whop": """{p} is [an honest soul|as honest as bread|no fool], you can believe every word; {p} lives near {place} and
 [misses nothing|sees everything|sleeps badly]; I have known {p} all my life; {p} is the best friend I have in {town};
 {p} talks a lot, and most of it is true; everyone in {town} knows {p}, just ask; {p} used to come to {at} every day,
 so I trust {him}; people laugh at {p}, but {he} was the only one who kept {his} eyes open; {p} owes me a favour, so
 {he} will talk to you""",
"whoq": """nobody knows much about {q}; {q} has been in {town} {since}, with too much luggage; I never liked {q}, and I am
 not alone; {q} pays well and answers nothing; ask about {q} at {place}, but softly; I once caught {q} looking through
 my window at {at}; some think {q} is harmless, I do not; {q} smiles at everyone and looks at nobody; be careful with
 {q}, there is a knife under that coat""",
"howhelp": "{asks}",
"yes": "{thank}",
"no": "{sulk}",
}.items()}

# What the player can say; each kind is answered from what the character has left to tell.
PLAYER = {key: items(text.replace("\n", " ")) for key, text in {
"cause": """Why did it happen?; How did it come to this?; What is behind it?; Do you know the reason?; Why?; Who would
 want that?; What do you think is the cause?; But why?; And who is to blame for {n}?""",
"sign": """Are you sure?; Did anybody see it?; How do you know?; What makes you think so?; Is there any proof?; What else
 do you know about {n}?; Tell me more about {n}.; Did you see it yourself?""",
"where": """Where should I go?; Where do I begin?; Which way is it?; Where exactly?; How do I get there?; Where was
 that?; Can you show me the place?""",
"pay": """What do I get for it?; What is in it for me?; And the reward?; How much do you pay?; Is there a reward?; I do
 not work for free.; And what will you give me?""",
"warn": """Is it dangerous?; What should I watch out for?; Is there anything I should know?; It sounds dangerous.; Any
 advice before I go?; What could go wrong?; Should I be afraid?""",
"whop": """Who is {pshort}?; Can I trust {pshort}?; Tell me about {pshort}.; And {pshort}?; What does {pshort} have to do
 with it?""",
"whoq": """And what about {qshort}?; Who is {qshort}?; What do you know about {qshort}?; Do you suspect {qshort}?; Tell me
 about {qshort}.""",
"life": """And who are you?; Tell me about yourself.; How long have you been here?; Have you always been a {role}?; What is
 your name?; Do you like your work?""",
"rumour": """What do people say about it?; Any rumours?; What else have you heard?; What is the talk in {town}?; Is that
 all?; Have you heard any news?""",
"old": """Was it always like this?; Do you remember better days?; Did this ever happen before?; What was it like in the
 old days?; Have you seen such a thing before?""",
"effect": """What does it mean for you?; How does it touch your work?; And you, how do you manage?; Why does it matter to
 you?; Is it bad for you?; How is work?""",
"howhelp": """How can I help?; What can I do?; Is there something I can do?; What do you want me to do?; Do you need
 help?; What would you have me do?""",
"trade": """What do you do here?; What do you have to offer?; Do you sell anything?; Show me what you have.; I am
 looking for something to buy.""",
"aid": """Can you help me with it?; What can you do to help?; Will you help me?; I cannot do it alone.; I will need
 some help.""",
"oath": "Can I trust you?; Is that the truth?; I do not believe you.; Do you swear it?; You are lying.",
"yes": """I will do it.; You can count on me.; Consider it done.; All right, I will go.; Yes, I will help you.; I accept.;
 Leave it to me.; I will see what I can do.; Fine, I will do it.""",
"no": """I have no time for this.; No, thank you.; Find somebody else.; That is not my problem.; I would rather not.; I
 am not the one you need.; No.""",
"bye": "Farewell.; I must go.; Goodbye.; I will be back.; Thank you, {name}.; Until next time.; See you tomorrow.",
}.items()}

# ---- templates --------------------------------------------------------------------------------

AGAIN = ["as I said, ", "I told you, ", "it is as I said, ", "I can only say it again, ", "I think that "]
TURNS = [0] * 29 + [1] * 11 + [2] * 5 + [3] * 3 + [5, 7]  # player lines in a document

PARSED = {}


def parse(text):
    """Template text as a list of strings, ('slot',) tuples and lists of alternatives."""
    if text not in PARSED:
        parts = []
        for piece in re.findall(r"\{\w+\}|\[[^\]]*\]|[^{\[]+", text):
            if piece[0] == "{":
                parts.append((piece[1:-1],))
            elif piece[0] == "[":
                parts.append([parse(p) for p in piece[1:-1].split("|")])
            else:
                parts.append(piece)
        PARSED[text] = parts
    return PARSED[text]


class Speaker:
    """One document: the fixed choices (who, where, when, why) and what has been said so far."""

    def __init__(self, rng, role, mood, topic, name):
        self.random = rng.random
        self.role, self.mood, self.topic, self.name = role, mood, topic, name
        self.r, self.m = ROLES[role], MOODS[mood]
        bang, dots, low, high, taste = self.m["style"]
        self.bang, self.dots, self.taste = float(bang), float(dots), taste
        self.low, self.high = int(low), int(high)
        self.family = FAMILIES[topic["family"]]
        self.story = self.family["stories"][self.pick(topic["stories"])]
        self.used, self.said_p, self.said_q, self.asked = set(), False, False, False
        self.a = self.pick(self.family["places"]) if topic["a"] == "*" else topic["a"]
        self.b = self.pick(self.family["marks"]) if topic["b"] == "*" else topic["b"]
        self.cause, self.said = None, topic["full"] + " " + self.a
        self.town = self.pick(TOWN_A) + self.pick(TOWN_B)
        head = set(re.findall(r"\w{4,}", topic["full"]))
        while True:
            self.place = self.pick(PLACES)
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
        coin = self.pick(NUMBERS) + " " + self.pick(["silver", "silver coins", "gold pieces", "coppers"])
        gift = self.pick(self.r["gift"])
        self.pay = self.pick([gift, gift, gift, coin, coin + " and " + gift])
        self.t_it = topic["pron"]

    def person(self, woman):
        n = self.pshort
        while True:
            job = self.pick(JOBS)
            if job in (MEN_ONLY if woman else WOMEN_ONLY) or job in self.topic["full"] or job in self.role:
                continue
            break
        kin = "sister" if woman else "brother"
        child = "daughter" if woman else "son"
        return self.pick([n + " the " + job, n + " the " + job, n + " the " + job, "old " + n, "young " + n,
                          "my cousin " + n, "my neighbour " + n, "my " + kin + " " + n, "my friend " + n,
                          "the " + job + "'s " + child + " " + n, n + " from next door",
                          n + " from " + self.pick(TOWN_A) + self.pick(TOWN_B)])

    def pick(self, seq):
        return seq[int(self.random() * len(seq))]

    def fresh(self, seq):
        """A choice not used before in this document, by the mood's taste for short or long."""
        left = [s for s in seq if s not in self.used] or seq
        left = [s for s in left if not NEEDS.get(s) or all(w in self.said for w in NEEDS[s])] or left
        one = self.pick(left)
        if self.taste != "=" and len(left) > 2 and self.random() < 0.6:
            two = self.pick(left)
            one = min(one, two, key=len) if self.taste == "-" else max(one, two, key=len)
        self.used.add(one)
        return one

    def slot(self, key, moody):
        t = self.topic
        if key == "p":
            if self.said_p:
                return self.pshort
            self.said_p = True
            return self.p
        if key in ("he", "him"):
            if self.said_p:
                return getattr(self, key)
            self.said_p = True
            return self.p
        if key == "his":
            return self.his if self.said_p else self.slot("p", moody) + "'s"
        if key == "q":
            if self.said_q:
                return self.qshort
            self.said_q = True
            return self.q
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
            many = t["pron"] == "they"
            return {"is": "are", "was": "were", "has": "have", "s": ""}[key] if many else key
        if key == "g":
            return t["noun"]
        if key == "gis":
            return "are" if t["many"] else "is"
        if key in ("a", "b", "at", "town", "place", "when", "since", "pay", "pshort", "qshort", "name", "role"):
            return getattr(self, key)
        if key == "num":
            return self.pick(NUMBERS[:12])
        if key == "deeding":
            return ing(self.pick(self.r["deed"]))
        if key == "deeds":
            return third(self.pick(self.r["deed"]))
        if key in ("deed", "deed2"):
            return self.fresh(self.r["deed"])
        if key == "do":
            return self.fill(self.fresh(self.story["ask"]))
        if key in self.r:
            return self.fill(self.fresh(self.r[key]))
        raise KeyError(key)

    def fill(self, text, moody=False):
        out = []
        for part in parse(text):
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, tuple):
                out.append(self.slot(part[0], moody))
            else:
                out.append("".join(self.fill_parts(self.pick(part), moody)))
        return "".join(out)

    def fill_parts(self, parts, moody):
        return [p if isinstance(p, str) else self.slot(p[0], moody) for p in parts]

    def sentence(self, text, moody=False, inter=0.0, bare=False):
        text = re.sub(r"\ba(?= [aeiou])", "an", self.fill(text, moody)) if "{role}" in text \
            else self.fill(text, moody)
        if inter and self.random() < inter:
            lead = self.pick(self.m["inter"])
            if text.split()[:2] != lead.strip(",").split()[:2] and not text.startswith(("remember", "between us")):
                text = lead + " " + text
        self.said += " " + text
        text = re.sub(r"(^|[.?!] )([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)
        if text[-1] in "?!.":
            return text
        roll = self.random()
        if bare:
            return text + "."
        if roll < self.bang:
            return text + "!"
        if roll < self.bang + self.dots:
            return text + "..."
        return text + "."

    # One sentence of each kind, drawn from the family, the story, the role, the mood or the shared frames.
    def tell(self, kind, inter=0.0):
        if kind == "cause":
            # One cause per story: asked again, it is told again.
            if self.cause:
                return self.sentence(self.pick(AGAIN) + self.cause)
            self.cause = self.fill(self.fresh(self.story["cause"]))
            return self.sentence(self.cause, inter=inter)
        if kind in ("fact", "sign", "warn", "next"):
            return self.sentence(self.fresh(self.story[kind]), inter=inter)
        if kind in ("effect", "old", "rumour", "where"):
            return self.sentence(self.fresh(self.family[kind]), inter=inter if kind != "old" else 0)
        if kind in ("open", "feel", "close", "reply", "thank", "sulk"):
            return self.sentence(self.fresh(self.m[kind]), moody=True)
        if kind == "ask":
            self.asked = True
            return self.sentence(self.fresh(self.m["ask"]))
        return self.sentence(self.fresh(COMMON[kind]))

    def speech(self):
        r = self.random
        out = []
        if r() < 0.62:
            out.append(self.tell("open"))
        if r() < 0.16:
            out.append(self.tell("intro"))
        out.append(self.tell("fact", 0.25 if out else 0.1))
        plans = [["sign"], ["cause"], ["effect"], ["feel"], ["sign", "cause"], ["sign", "feel"], ["effect", "feel"],
                 ["cause", "effect"], ["sign", "effect"], ["old", "effect"], ["rumour", "feel"], ["src", "sign"],
                 ["old", "cause"], ["cause", "say"], ["effect", "say"], ["life", "feel"], ["sign", "rumour"],
                 ["fear", "cause"], ["oath", "sign"], ["feel", "cause"]]
        plan = self.pick([p for p in plans if self.low <= len(p) <= self.high and (len(p) == 1 or r() < 0.4)])
        for kind in plan:
            out.append(self.tell(kind, 0.22))
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
            return self.tell("close") if self.random() < 0.7 else self.tell("warn") + " " + self.tell("close")
        out = []
        if kind == "yes":
            out = [self.tell("thank"), self.tell("next", 0.1)]
            if self.random() < 0.3:
                out.append(self.tell(self.pick(["aid", "pay", "warn"])))
        elif kind == "no":
            out = [self.tell("sulk")]
            if self.random() < 0.5:
                out.append(self.tell(self.pick(["feel", "pay", "oath"])))
        else:
            if self.random() < 0.5:
                out.append(self.tell("reply"))
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
        if kind not in ("yes", "no") and self.random() < 0.18:
            out.append(self.tell("close"))
        return " ".join(out)

    def document(self):
        fields = ["role: " + self.role, "mood: " + self.mood, "topic: " + self.topic["full"], "name: " + self.name]
        if self.random() < 0.06:
            del fields[1 + int(self.random() * 3)]
        lines = [" | ".join(fields), self.speech()]
        turns = self.pick(TURNS)
        asked = set()
        for i in range(turns):
            kinds = [k for k in PLAYER if k not in asked and (k != "whop" or self.said_p)
                     and (k != "whoq" or self.said_q) and k != "bye"
                     and (k not in ("yes", "no", "pay") or self.asked) and (k != "howhelp" or not self.asked)]
            kind = "bye" if i and i == turns - 1 and self.random() < 0.3 else self.pick(kinds)
            asked.add(kind)
            if kind in ("yes", "no"):
                asked |= {"yes", "no"}
            lines.append("> " + self.sentence(self.pick(PLAYER[kind])))
            lines.append(self.answer(kind))
        return "\n".join(lines) + "\n"


def name_of(rnd, woman):
    roll = rnd()
    if roll > 0.7:
        name = ""
        for _ in range(2 + int(rnd() * 1.5)):
            for part in (ONSETS, VOCALS, CODAS):
                name += part[int(rnd() * len(part))]
        return name[:9].capitalize()
    if roll < 0.3:
        seq = FEMALE if woman else MALE
        return seq[int(rnd() * len(seq))]
    ends = ENDS_F if woman else ENDS_M
    return STARTS[int(rnd() * len(STARTS))] + ends[int(rnd() * len(ends))]


KEPT = {}


def kept(text, one_in):
    """True for a fixed pseudo-random one in `one_in` of all texts: those kept out of training."""
    if text not in KEPT:
        KEPT[text] = hashlib.sha256(text.encode()).digest()[0] % one_in == 0
    return KEPT[text]


def heldout_name(name):
    return kept("name " + name, 12)


def heldout_pair(role, topic):
    return kept(role + " + " + topic["full"], 12)


def document(split, i):
    """Document i of split 'train' or 'heldout'."""
    rng = random.Random("%s %d" % (split, i))
    rnd = rng.random
    want = split != "train"
    # Families are drawn evenly; inside one, every frame and noun is as likely as the others.
    while True:
        role = ROLE_NAMES[int(rnd() * len(ROLE_NAMES))]
        fam = BY_FAMILY[int(rnd() * len(BY_FAMILY))]
        topic = fam[int(rnd() * len(fam))]
        if heldout_pair(role, topic) == want:
            break
    while True:
        name = name_of(rnd, rnd() < 0.5)
        if heldout_name(name) == want:
            break
    mood = MOOD_NAMES[int(rnd() * len(MOOD_NAMES))]
    return Speaker(rng, role, mood, topic, name).document()


BY_FAMILY = [[t for t in TOPICS if t["family"] == f and t["open"] == o] for o in (False, True) for f in FAMILIES]
BY_FAMILY = [f for f in BY_FAMILY if f]


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("train", "heldout"):
        sys.exit("usage: corpus.py train|heldout documents [first]")
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    for i in range(first, first + int(sys.argv[2])):
        sys.stdout.write(document(sys.argv[1], i) + "\n")


if __name__ == "__main__":
    main()
