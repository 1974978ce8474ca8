"""Words: what sentences are made of, and random ones.

All lists are written here; none is taken from elsewhere. `r` is a `random.Random` everywhere in this package.
"""

NAMES = """Alice Bob Carla David Emma Felix Grace Hugo Iris Jack Kira Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Uma
Victor Wendy Xavier Yara Zoe Ahmed Bianca Chen Diego Elif Farah Goran Hana Ivan Julia Kenji Lucia Marco Nadia Omar
Priya Ravi Sofia Tomas Ines Lars Maya Nils Petra""".split()

COLORS = """amber blue coral crimson cyan gold gray green indigo ivory jade lilac lime mauve navy olive orange pink
purple red ruby silver teal violet white yellow black brown""".split()

ANIMALS = """ant bear bee cat cow crab crow deer dog duck eagle fish fox frog goat goose hawk hen horse lion lizard
mole mouse otter owl panda pig rabbit raven seal shark sheep snail snake swan tiger turtle whale wolf zebra""".split()

FOODS = """apple apricot banana bean berry bread butter cake carrot cheese cherry corn egg fig garlic grape honey lemon
lentil mango melon milk mint mushroom nut oat olive onion peach pear pepper plum potato rice salt soup sugar tea tomato
walnut""".split()

OBJECTS = """anchor arrow bag ball basket bell bench bike boat book bottle bowl box bridge brush bucket button cable
candle card chair clock coat coin cup desk door drum engine fan feather flag flute fork gate glass glove hammer hat
helmet hook key kite knife ladder lamp lantern leaf letter lock map mask mirror needle oven paper pen pencil pillow
pipe plate pump radio ring rope ruler sail scale shell shoe spoon stone string table tent ticket tool tower train
vase violin wagon wheel whistle window wire""".split()

PLACES = """forest river village mountain valley garden harbor meadow island desert castle market library farm lake
city cave beach school museum""".split()

ADJ = """big small young quiet loud bright dark warm cold soft hard fast slow happy sad brave shy clever kind tall
short heavy light clean dusty fresh gentle lucky plain round sharp simple smooth strong tiny wide wild wise""".split()

CAPITALS = dict(
    France="Paris",
    Germany="Berlin",
    Spain="Madrid",
    Italy="Rome",
    Portugal="Lisbon",
    Japan="Tokyo",
    China="Beijing",
    India="New Delhi",
    Canada="Ottawa",
    Brazil="Brasilia",
    Egypt="Cairo",
    Kenya="Nairobi",
    Norway="Oslo",
    Sweden="Stockholm",
    Finland="Helsinki",
    Denmark="Copenhagen",
    Poland="Warsaw",
    Austria="Vienna",
    Greece="Athens",
    Turkey="Ankara",
    Russia="Moscow",
    Mexico="Mexico City",
    Cuba="Havana",
    Peru="Lima",
    Chile="Santiago",
    Argentina="Buenos Aires",
    Ireland="Dublin",
    Belgium="Brussels",
    Hungary="Budapest",
    Ukraine="Kyiv",
    Thailand="Bangkok",
    Vietnam="Hanoi",
    Australia="Canberra",
    Iran="Tehran",
    Iraq="Baghdad",
    Morocco="Rabat",
    England="London",
    Iceland="Reykjavik",
)

CITIES = (
    sorted(set(CAPITALS.values()))
    + """Boston Chicago Dallas Denver Geneva Hamburg Lagos Lyon Milan Mumbai Munich
Osaka Porto Seattle Seoul Shanghai Sydney Toronto Turin Zurich""".split()
)

JOBS = """baker builder chef clerk dancer doctor driver engineer farmer lawyer miner nurse painter pilot poet potter
sailor singer tailor teacher writer""".split()

OPPOSITES = [
    p.split("/")
    for p in """hot/cold big/small up/down in/out day/night fast/slow happy/sad hard/soft high/low
left/right light/dark long/short new/old open/closed rich/poor strong/weak true/false wet/dry young/old early/late
empty/full clean/dirty near/far loud/quiet""".split()
]

WORDS_FR = dict(
    cat="chat",
    dog="chien",
    house="maison",
    water="eau",
    bread="pain",
    book="livre",
    sun="soleil",
    moon="lune",
    tree="arbre",
    red="rouge",
    blue="bleu",
    green="vert",
    milk="lait",
    fish="poisson",
    day="jour",
)

WORDS_ES = dict(
    cat="gato",
    dog="perro",
    house="casa",
    water="agua",
    bread="pan",
    book="libro",
    sun="sol",
    moon="luna",
    tree="arbol",
    red="rojo",
    blue="azul",
    green="verde",
    milk="leche",
    fish="pez",
    day="dia",
)

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

MONTHS = "January February March April May June July August September October November December".split()

ALL = sorted(set(COLORS + ANIMALS + FOODS + OBJECTS + PLACES + ADJ))

SYL = [c + v for c in "b d f g k l m n p r s t v z".split() for v in "aeiou"]

COMMON = """about above after again all also always and another any around ask away back because before begin below
between both bring build call can carry change close come could cross cut do down draw drink drive each eat end enough
even ever every fall far feel few fill find first fly follow for found from full gave get give go good great grow had
half hand has have head hear help her here him his hold home how hundred if into its just keep kind know large last
late laugh learn leave left let life like line listen little live look made make many may me mean men might mile more
morning most move much must my name near need never new next night no not now of off often on once one only open or
other our out over own page part pass people place plan play point pull put question quick quiet ran read ready rest
right run said same saw say second see seem sentence set she should show side since sing sit sleep some song soon sound
stand start stay still stop story such sun take talk tell than that the their them then there these they thing think
this those thought three through time to today together took travel tree try turn two under until up upon us use very
wait walk want warm was watch water way we week well went were what when where which while who why will wind wish with
without word work world would write year yes yet you your""".split()


def pseudo(r):
    """A word that nobody knows."""
    return "".join(r.choice(SYL) for _ in range(r.randint(2, 3)))


def word(r):
    """A word of any kind, now and then a made-up one."""
    x = r.random()
    return r.choice(ALL) if x < 0.55 else r.choice(COMMON) if x < 0.8 else pseudo(r) if x < 0.93 else r.choice(NAMES)


def digits(r, n):
    """`n` random digits."""
    return "".join(r.choice("0123456789") for _ in range(n))


def art(w):
    """`w` with its article."""
    return ("an " if w[0] in "aeiou" else "a ") + w
