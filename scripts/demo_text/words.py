"""Word lists that several parts of the generator use."""

from __future__ import annotations

from random import Random

from .grammar import chance, pick


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(p.split()) for p in text.replace("\n", " ").split(",") if p.strip())


GIRLS = _words("""Anna Emma Lily Mia Sophie Clara Nora Ella Ruby Alice Rosa Maya Lucy Hannah Zoe Julia Eva Lena Ida Ada
    Grace Olivia Maria Sara Laura Nina Tess Kate Jane Mary Susan Linda Helen Diana Amy Carla Paula Vera Wanda Iris Daisy
    Hazel Ivy Molly Polly Tina Rita Greta Heidi Freya Astrid Ingrid Yuki Mei Aisha Fatima Leila Priya Anita Kavya Elena
    Olga Irina Natasha Chloe Amelie Camille Bella Stella Luna Aurora Penny Betty Dora Flora Martha Agnes Edith Violet""")
BOYS = _words("""Tom Max Leo Ben Sam Jack Oscar Felix Hugo Paul Peter Noah Liam Finn Theo Otto Emil Anton Karl Erik Lars
    Nils Jonas Lukas David Daniel Adam Simon Mark John James Robert Michael Chris Alex Victor Ivan Boris Igor Marco
    Luca Diego Carlos Pedro Juan Miguel Ali Omar Hassan Ravi Arjun Raj Kenji Hiro Wei Chen Bruno Rocco Milo Toby Billy
    Charlie Henry George Arthur Walter Frank Fred Harry Oliver Jasper Rufus Barney Monty Gus Ned Ted Bob Tim Jim Rob""")
PET_NAMES = _words("""Bella Luna Max Charlie Buddy Rocky Coco Milo Simba Nala Tiger Shadow Lucky Oscar Daisy Rex Fluffy
    Snowy Pepper Ginger Biscuit Cookie Muffin Pumpkin Peanut Bubbles Goldie Whiskers Mittens Socks Patches Spot Bruno""")

COLOURS = _words(
    "red blue green yellow orange purple pink white black brown grey silver golden turquoise violet"
)
FOODS = _phrases("""pizza, pasta, soup, bread, cheese, rice, apple pie, pancakes, chocolate, ice cream, salad, curry,
    noodles, sushi, tacos, honey, strawberries, cake, potatoes, fish, eggs, tomato soup, dumplings, waffles, cookies,
    sandwiches, mushrooms, lasagna, burgers, fruit, yoghurt, popcorn""")
HOBBIES = _phrases("""reading, painting, swimming, running, cooking, gardening, dancing, singing, drawing, hiking, fishing,
    cycling, chess, football, tennis, basketball, photography, knitting, climbing, playing the guitar, playing the piano,
    programming, skating, writing, baking, sailing, yoga, playing games, watching films, travelling, camping, skiing""")
JOBS = _phrases("""teacher, doctor, nurse, baker, farmer, engineer, programmer, painter, gardener, driver, pilot, cook,
    student, writer, musician, carpenter, scientist, police officer, firefighter, dentist, librarian, shop assistant,
    electrician, plumber, designer, lawyer, photographer, waiter, mechanic, researcher""")
CITIES = _words("""Paris London Berlin Madrid Rome Vienna Prague Oslo Stockholm Copenhagen Helsinki Warsaw Budapest Athens
    Lisbon Dublin Amsterdam Brussels Zurich Geneva Munich Hamburg Milan Venice Barcelona Boston Chicago Seattle Toronto
    Montreal Sydney Melbourne Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Bangalore Cairo Lagos Nairobi
    Singapore Bangkok Hanoi Jakarta Manila Istanbul Moscow Kyiv Lima Bogota Santiago""")
PETS = _words("cat dog rabbit hamster parrot horse turtle goldfish canary mouse snake lizard pony")

THINGS = _phrases("""toaster, potato, cloud, spoon, teapot, chair, lamp, pencil, book, umbrella, bicycle, train, boat, kite,
    clock, mirror, candle, pillow, carrot, banana, cookie, cupcake, cheese, snowman, scarecrow, balloon, bell, broom,
    button, camera, carpet, castle, computer, crayon, cup, curtain, door, drum, feather, flower, fork, guitar, hammer,
    hat, jacket, kettle, key, ladder, leaf, letter, marble, mitten, moon, mountain, mushroom, needle, onion, orange,
    pancake, peach, pear, piano, pebble, pumpkin, puppet, puzzle, radio, raindrop, river, rock, rocket, sandwich, scarf,
    shoe, snowflake, sock, star, stone, suitcase, sunflower, table, telescope, tomato, tower, tractor, tree, truck,
    trumpet, vase, violin, wagon, wheel, whistle, window, wave, yoyo, zipper, backpack, blanket, brick, bucket, bus,
    cactus, car, comet, crane, doll, engine, fence, fridge, island, jar, magnet, notebook, paintbrush, planet, satellite,
    submarine, taxi, tent, tram, trolley, turnip, volcano, walnut, windmill, neuron, processor, keyboard""")

VERBS_ING = _phrases("""sleeping, walking, thinking, laughing, waiting, working, learning, dreaming, cleaning, jumping,
    travelling, shopping, resting, looking out of the window, playing outside, making tea, talking to friends""")

_STARTS = _words("b br c ch cl d dr f fl g gl gr h j k kr l m n p pl pr qu r s sh sk st t th tr v w y z")
_MIDDLES = _words("a e i o u ai ee oa ou ia eo y")
_ENDS = _words("n r l m s t k nd rt lin ber ton mar dor vik lan ric x sh th ck nna ro lo mi to")


def made_up(rng: Random, syllables: int | None = None) -> str:
    """A word that no dictionary has, in lower case: it teaches to copy, and to say `I do not know`."""
    count = syllables or (2 if chance(rng, 0.7) else 1)
    return "".join(pick(rng, _STARTS) + pick(rng, _MIDDLES) for _ in range(count)) + pick(rng, _ENDS)


def person_name(rng: Random) -> str:
    """Mostly a name from the lists, now and then one that was never seen."""
    if chance(rng, 0.25):
        return made_up(rng).capitalize()
    return pick(rng, GIRLS if chance(rng, 0.5) else BOYS)
