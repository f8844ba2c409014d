"""Simple things to know: animals, colours, days, opposites, kinds of things, capitals, and short explanations."""

from __future__ import annotations


def _table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(";")] for line in text.strip().splitlines()]


# name; sound; young; home; food; legs; can it fly; class; size rank
ANIMALS = _table("""
    cow; moo; calf; farm; grass; four; no; mammal; 8
    dog; woof; puppy; house; meat; four; no; mammal; 5
    cat; meow; kitten; house; mice and fish; four; no; mammal; 4
    sheep; baa; lamb; meadow; grass; four; no; mammal; 6
    pig; oink; piglet; farm; almost everything; four; no; mammal; 7
    horse; neigh; foal; stable; hay and oats; four; no; mammal; 8
    duck; quack; duckling; pond; water plants; two; yes; bird; 3
    hen; cluck; chick; henhouse; grain; two; hardly; bird; 3
    rooster; cock-a-doodle-doo; chick; farm; grain; two; hardly; bird; 3
    frog; ribbit; tadpole; pond; insects; four; no; amphibian; 2
    lion; roar; cub; savanna; meat; four; no; mammal; 8
    tiger; roar; cub; jungle; meat; four; no; mammal; 8
    bear; growl; cub; forest; berries, honey and fish; four; no; mammal; 8
    wolf; howl; pup; forest; meat; four; no; mammal; 6
    fox; bark; cub; den in the forest; mice and berries; four; no; mammal; 5
    mouse; squeak; pup; hole in the ground; grain and cheese; four; no; mammal; 1
    owl; hoo; owlet; hollow tree; mice; two; yes; bird; 3
    bee; buzz; larva; hive; nectar; six; yes; insect; 0
    snake; hiss; snakelet; warm stones; mice; no; no; reptile; 3
    elephant; trumpet; calf; savanna; leaves and grass; four; no; mammal; 10
    monkey; chatter; infant; jungle; fruit; four; no; mammal; 5
    penguin; squawk; chick; cold south; fish; two; no; bird; 4
    whale; song; calf; ocean; tiny sea animals; no; no; mammal; 12
    dolphin; click; calf; ocean; fish; no; no; mammal; 8
    spider; nothing at all; spiderling; web; insects; eight; no; arachnid; 0
    ant; nothing at all; larva; ant hill; seeds and sugar; six; no; insect; 0
    butterfly; nothing at all; caterpillar; meadow; nectar; six; yes; insect; 0
    rabbit; squeak; kit; burrow; grass and carrots; four; no; mammal; 3
    goat; bleat; kid; mountain; grass and leaves; four; no; mammal; 6
    donkey; hee-haw; foal; stable; hay; four; no; mammal; 8
    goose; honk; gosling; pond; grass; two; yes; bird; 4
    crow; caw; chick; nest in a tree; almost everything; two; yes; bird; 3
    turtle; hiss; hatchling; shell near the water; plants; four; no; reptile; 3
    fish; nothing at all; fry; water; small water animals; no; no; fish; 2
    giraffe; hum; calf; savanna; leaves; four; no; mammal; 10
    kangaroo; grunt; joey; grassland of Australia; grass; two big and two small; no; mammal; 7
    panda; bleat; cub; bamboo forest; bamboo; four; no; mammal; 7
    hedgehog; snuffle; hoglet; pile of leaves; insects; four; no; mammal; 2
    squirrel; chatter; kit; nest in a tree; nuts; four; no; mammal; 2
    eagle; scream; eaglet; nest on a cliff; fish and rabbits; two; yes; bird; 4
    parrot; talk; chick; jungle; seeds and fruit; two; yes; bird; 3
    crocodile; growl; hatchling; river; meat; four; no; reptile; 9
    bat; squeak; pup; cave; insects; two; yes; mammal; 2
    camel; grunt; calf; desert; dry grass; four; no; mammal; 8
    octopus; nothing at all; larva; sea; crabs; eight arms and no; no; mollusc; 5
    swan; hiss; cygnet; lake; water plants; two; yes; bird; 5
    deer; bark; fawn; forest; leaves and grass; four; no; mammal; 7
    hamster; squeak; pup; burrow; grain; four; no; mammal; 1
""")

# things of a colour
COLOURED = {
    "yellow": "a banana;a lemon;the sun;a canary;a sunflower;butter;a chick;corn",
    "red": "a tomato;a strawberry;blood;a fire engine;a cherry;a stop sign;a rose;a ladybird",
    "green": "grass;a leaf;a frog;a cucumber;a pea;spinach;a crocodile;broccoli;a lime",
    "blue": "the sky;the sea;a blueberry;a sapphire",
    "white": "snow;milk;a swan;salt;a polar bear;sugar;a cloud;rice;flour;an egg",
    "black": "coal;a raven;the night;tar;a panther;a crow",
    "orange": "a carrot;an orange;a pumpkin;a tangerine;a goldfish",
    "brown": "chocolate;a bear;coffee;wood;a potato;a chestnut;soil;a nut",
    "grey": "an elephant;a mouse;ash;a stone;a rain cloud;a dolphin",
    "pink": "a flamingo;a pig;a piglet;bubble gum",
    "purple": "a plum;an aubergine;lavender;a grape;a violet",
    "gold": "a crown;a wedding ring",
}
MIXES = [
    ("red", "yellow", "orange"),
    ("blue", "yellow", "green"),
    ("red", "blue", "purple"),
    ("red", "white", "pink"),
    ("black", "white", "grey"),
    ("red", "green", "brown"),
]

OPPOSITES = [
    tuple(pair.split("-"))
    for pair in """hot-cold big-small fast-slow high-low old-new young-old happy-sad light-dark day-night good-bad
    wet-dry full-empty strong-weak loud-quiet rich-poor early-late hard-soft long-short near-far open-closed clean-dirty
    up-down left-right in-out front-back first-last thick-thin wide-narrow deep-shallow heavy-light easy-difficult
    sweet-sour black-white true-false right-wrong yes-no love-hate always-never everything-nothing begin-end start-stop
    win-lose buy-sell push-pull laugh-cry come-go give-take remember-forget ask-answer sleep-wake war-peace friend-enemy
    summer-winter morning-evening north-south east-west brother-sister man-woman boy-girl king-queen father-mother
    inside-outside above-below before-after more-less many-few alive-dead awake-asleep brave-afraid clever-stupid
    tall-short smooth-rough sharp-blunt safe-dangerous rude-polite beautiful-ugly expensive-cheap noisy-silent
    sparse-dense positive-negative on-off add-subtract enter-leave arrive-depart lend-borrow raise-lower build-destroy
    find-lose top-bottom heaven-hell success-failure fresh-stale tight-loose straight-crooked bright-dim""".split()
]

KINDS = {
    "fruit": "apple banana pear cherry grape orange lemon peach plum strawberry melon mango pineapple kiwi raspberry blueberry fig apricot",
    "vegetable": "carrot potato onion cabbage pea bean spinach broccoli cauliflower leek pumpkin radish lettuce beetroot turnip",
    "animal": "dog cat horse cow lion elephant mouse rabbit fox bear wolf tiger giraffe monkey camel hedgehog",
    "bird": "sparrow eagle owl duck swan crow parrot penguin robin stork goose pigeon seagull",
    "insect": "bee ant butterfly beetle fly mosquito ladybird moth grasshopper dragonfly",
    "tool": "hammer saw screwdriver drill spade rake axe wrench file shovel",
    "musical instrument": "piano guitar violin drum flute trumpet cello harp clarinet saxophone organ",
    "piece of clothing": "shirt coat hat scarf sock jacket skirt dress glove sweater shoe",
    "piece of furniture": "table chair bed sofa cupboard shelf desk wardrobe stool",
    "vehicle": "car bus train bicycle ship tram lorry tractor motorbike helicopter boat aeroplane",
    "sport": "football tennis swimming basketball hockey skiing volleyball boxing handball rowing",
    "colour": "red blue green yellow black white orange purple pink brown grey",
    "flower": "rose tulip daisy lily sunflower violet daffodil orchid poppy",
    "tree": "oak pine birch maple willow beech ash lime fir",
    "drink": "water milk tea coffee juice lemonade cocoa",
    "metal": "iron gold silver copper tin lead zinc aluminium",
    "planet": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "job": "teacher doctor baker farmer nurse painter pilot carpenter cook gardener",
    "part of the body": "hand foot head arm leg nose ear eye mouth knee finger shoulder",
    "room": "kitchen bedroom bathroom cellar hall attic",
    "toy": "doll kite ball puzzle yoyo puppet marble",
    "language": "English French German Spanish Italian Chinese Japanese Russian Arabic Hindi",
    "continent": "Africa Asia Europe Australia Antarctica",
    "country": "France Germany Italy Spain China India Japan Brazil Canada Egypt",
    "programming language": "Python C Java Rust Go Fortran Lisp",
}
MASS_KINDS = {
    "drink",
    "sport",
    "metal",
    "colour",
    "planet",
    "language",
    "continent",
    "country",
    "programming language",
}
PLURALS = {
    "fruit": "fruits",
    "piece of clothing": "pieces of clothing",
    "piece of furniture": "pieces of furniture",
    "part of the body": "parts of the body",
    "country": "countries",
}

CAPITALS = [
    tuple(pair.split("="))
    for pair in """France=Paris;Germany=Berlin;Italy=Rome;Spain=Madrid;Portugal=Lisbon;the United Kingdom=London;England=London;Ireland=Dublin;the Netherlands=Amsterdam;Belgium=Brussels;
Switzerland=Bern;Austria=Vienna;Poland=Warsaw;the Czech Republic=Prague;Hungary=Budapest;Greece=Athens;Turkey=Ankara;Russia=Moscow;Ukraine=Kyiv;Sweden=Stockholm;Norway=Oslo;Denmark=Copenhagen;
Finland=Helsinki;Iceland=Reykjavik;the United States=Washington, D.C.;Canada=Ottawa;Mexico=Mexico City;Brazil=Brasilia;Argentina=Buenos Aires;Chile=Santiago;Peru=Lima;Colombia=Bogota;Cuba=Havana;
Egypt=Cairo;Morocco=Rabat;Kenya=Nairobi;Nigeria=Abuja;Ethiopia=Addis Ababa;Ghana=Accra;Japan=Tokyo;China=Beijing;South Korea=Seoul;India=New Delhi;Pakistan=Islamabad;Thailand=Bangkok;Vietnam=Hanoi;
Indonesia=Jakarta;the Philippines=Manila;Australia=Canberra;New Zealand=Wellington;Iran=Tehran;Iraq=Baghdad;Saudi Arabia=Riyadh;Romania=Bucharest;Bulgaria=Sofia;Croatia=Zagreb;Serbia=Belgrade""".replace(
        "\n", ""
    ).split(";")
]

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
SEASONS = "spring summer autumn winter".split()
AMOUNTS = [
    ("days", "a week", "seven"),
    ("hours", "a day", "twenty-four"),
    ("minutes", "an hour", "sixty"),
    ("seconds", "a minute", "sixty"),
    ("months", "a year", "twelve"),
    ("days", "a year", "365, and 366 in a leap year"),
    ("weeks", "a year", "about fifty-two"),
    ("seasons", "a year", "four"),
    ("letters", "the alphabet", "twenty-six"),
    ("years", "a century", "one hundred"),
    ("legs", "a table", "usually four"),
    ("wheels", "a bicycle", "two"),
    ("wheels", "a car", "four"),
    ("fingers", "a hand", "five, with the thumb"),
    ("toes", "two feet", "ten"),
    ("sides", "a triangle", "three"),
    ("sides", "a square", "four"),
    ("corners", "a triangle", "three"),
    ("strings", "a violin", "four"),
    ("strings", "a guitar", "usually six"),
    ("metres", "a kilometre", "one thousand"),
    ("grams", "a kilogram", "one thousand"),
    ("centimetres", "a metre", "one hundred"),
    ("bits", "a byte", "eight"),
    ("planets", "the solar system", "eight"),
    ("continents", "the world", "seven"),
    ("players", "a football team", "eleven"),
    ("colours", "the rainbow", "seven"),
    ("vowels", "the alphabet", "five: a, e, i, o and u"),
    ("dozens", "twenty-four", "two"),
    ("eggs", "a dozen", "twelve"),
    ("years", "a decade", "ten"),
    ("eyes", "a human face", "two"),
    ("bytes", "a kilobyte", "one thousand, or 1024 in the old way of counting"),
]

# name; what it is; facts
CONCEPTS = [
    (row[0], row[1], row[2:])
    for row in _table("""
    the sun; The sun is a star; It gives the Earth light and warmth.; It is much bigger than the Earth.; It rises in the east and sets in the west.
    the moon; The moon goes around the Earth; It takes about four weeks for one round.; It has no light of its own; it reflects the light of the sun.; People walked on it for the first time in 1969.
    the Earth; The Earth is the planet we live on; It goes around the sun once a year.; It turns once a day, so we have day and night.; Most of it is covered with water.
    a star; A star is a huge ball of hot gas that shines; The sun is the nearest star.; Stars look small because they are very far away.
    a planet; A planet is a large round body that goes around a star; Our solar system has eight planets.; Jupiter is the largest one.
    Mars; Mars is the fourth planet from the sun; It is called the red planet.; Robots drive around on it.
    Jupiter; Jupiter is the largest planet of our solar system; It has a big red storm.; It has many moons.
    rain; Rain is water that falls from clouds; Plants need it to grow.; When the sun shines through it, you may see a rainbow.
    snow; Snow is frozen water that falls from clouds; It falls when it is very cold.; Each flake is a small crystal with six sides.
    ice; Ice is frozen water; Water freezes at zero degrees Celsius.; Ice is lighter than water, so it swims on top.
    a cloud; A cloud is made of very small drops of water; When the drops grow heavy, it rains.; Fog is a cloud on the ground.
    wind; Wind is moving air; It blows because some air is warmer than other air.; It can turn windmills and push ships.
    a storm; A storm is very strong wind, often with rain; At sea it makes high waves.; It is best to stay inside then.
    thunder; Thunder is the sound of lightning; You hear it later than you see the lightning, because light is faster than sound.
    lightning; Lightning is a big electric spark in the sky; It is very hot and very short.; Thunder follows it.
    a rainbow; A rainbow is a bow of colours in the sky; You see it when the sun shines on rain.; Its colours go from red to violet.
    water; Water is a liquid that all living things need; It boils at one hundred degrees Celsius.; It freezes at zero degrees.
    fire; Fire is what we see when something burns; It gives light and heat.; It needs air and something to burn.
    air; Air is a mix of gases that we breathe; You cannot see it, but you can feel it as wind.; Most of it is nitrogen, and a fifth is oxygen.
    a tree; A tree is a tall plant with a wooden trunk; Its leaves catch the light of the sun.; Trees can become hundreds of years old.
    a flower; A flower is the part of a plant that makes seeds; Many flowers smell good and have bright colours.; Bees visit them to get nectar.
    a seed; A seed is a small thing from which a plant grows; It needs water and warmth.; Even a huge tree was once a small seed.
    a mountain; A mountain is a very high hill; It is cold on the top of high mountains.; The highest one is Mount Everest.
    a river; A river is water that flows through the land; It begins at a spring and ends in a lake or the sea.; The Nile and the Amazon are the longest ones.
    the sea; The sea is a very large body of salt water; Ships sail on it and fish live in it.; Its water rises and falls with the tides.
    an island; An island is land with water all around it; You need a boat, a plane or a bridge to get there.; Iceland and Madagascar are large ones.
    a desert; A desert is a very dry place; It hardly ever rains there.; The Sahara in Africa is a famous one.
    a volcano; A volcano is a mountain that can spit fire and hot stone; The hot liquid stone is called lava.; Most volcanoes are asleep.
    a forest; A forest is a large place with many trees; Deer, foxes and owls live there.; It cleans the air.
    winter; Winter is the coldest season; The days are short.; In many places there is snow.
    summer; Summer is the warmest season; The days are long.; Many people go swimming.
    spring; Spring is the season after winter; Flowers come out and birds build nests.; The days get longer.
    autumn; Autumn is the season before winter; Leaves turn yellow and red and fall.; Apples and nuts are ripe.
    a computer; A computer is a machine that follows instructions; It computes very fast.; Programs tell it what to do.
    a program; A program is a list of instructions for a computer; People write programs in languages like Python or C.; I am run by a program too.
    the internet; The internet connects computers all over the world; People use it to write to each other and to read.; I do not need it, I run on your computer.
    memory; Memory is where a computer keeps numbers while it works; Fast memory is small, large memory is slower.; Reading the weights from memory takes most of my time.
    Python; Python is a programming language; It is easy to read.; PowerInfer can be used from Python.
    Linux; Linux is a free operating system; It runs on servers, telephones and laptops.; PowerInfer runs on it.
    a robot; A robot is a machine that can do work by itself; Some robots build cars, others clean floors.; I am no robot, I have no body.
    a book; A book is many pages with text or pictures; People read it to learn or for fun.; A place with many books is called a library.
    a library; A library is a place with many books; You can borrow them and bring them back.; In programming, it is code that other programs use.
    music; Music is sound that people make for joy; It can make you happy or sad.; You can sing it or play it on an instrument.
    a piano; A piano is a musical instrument with keys; It has 88 keys, black and white.; Small hammers hit the strings inside.
    a guitar; A guitar is a musical instrument with strings; Most guitars have six strings.
    a lighthouse; A lighthouse is a tower with a strong light by the sea; It shows ships the way at night.; In old times a keeper lived in it.
    a castle; A castle is a large strong house with thick walls; Kings and knights lived there long ago.; Many have towers and a bridge.
    a bridge; A bridge is a way over water or a road; It can be made of wood, stone or steel.
    a train; A train is a long vehicle on rails; It takes people and goods from one station to another.
    a bicycle; A bicycle is a vehicle with two wheels; You move it with your feet.; It is good for you and for the air.
    a ship; A ship is a large boat; It carries people or goods over the sea.; The captain leads it.
    a dragon; A dragon is an animal from old stories; It can fly and spit fire.; There are no real dragons, but good stories about them.
    a unicorn; A unicorn is a horse with one horn, from old stories; It does not really exist.
    a friend; A friend is somebody who likes you and helps you; You can laugh and talk together.
    a family; A family is a group of people who belong together; Parents, children and grandparents are a family.
    bread; Bread is food made of flour, water and salt; It is baked in an oven.; Yeast makes it light.
    cheese; Cheese is food made of milk; There are many kinds, soft and hard.
    honey; Honey is a sweet food that bees make; They make it from nectar.
    chocolate; Chocolate is a sweet food made from cocoa beans; It is brown, and most people like it.
    tea; Tea is a hot drink made from leaves; People drink it with milk, sugar or lemon.
    coffee; Coffee is a hot drink made from roasted beans; It keeps people awake.
    a school; A school is a place where people learn; Teachers work there.
    a doctor; A doctor is a person who helps ill people; Doctors work in hospitals and practices.
    a baker; A baker is a person who makes bread and cakes; Bakers get up very early.
    a map; A map is a picture of a place from above; It helps you to find the way.
    a compass; A compass is a tool that shows where north is; Its needle is a small magnet.
    a magnet; A magnet is a thing that pulls iron; It has a north pole and a south pole.
    electricity; Electricity is a kind of energy that flows through wires; It makes lamps shine and computers run.
    light; Light is what lets us see; It is the fastest thing there is.; White light is a mix of all colours.
    sound; Sound is a movement of the air that we can hear; It is much slower than light.
    gravity; Gravity is the force that pulls things down; It keeps us on the ground and the moon near the Earth.
    gold; Gold is a yellow and precious metal; It does not rust.
    a dinosaur; A dinosaur is an animal that lived very long ago; They died out about 66 million years ago.; Birds are their relatives.
    time; Time is what clocks measure; An hour has sixty minutes.
    a number; A number tells how many; You can add, subtract and multiply numbers.; To a computer, everything is a number.
    zero; Zero is the number before one; If you add it, nothing changes.; It is my favourite number, because zeros can be skipped.
    a matrix; A matrix is a table of numbers; My weights are matrices.; Multiplying a matrix by a list of numbers is most of my work.
    a weight; A weight is one of the learned numbers of a model; I have about twenty million of them.; Each takes four bits in my file.
    a layer; A layer is one step of a model; I have 8 of them.; Each has attention and a feed-forward network.
    a story; A story tells what happened to somebody; It has a beginning, a middle and an end.; Ask me for one!
    a poem; A poem is a short text with rhythm, often with rhymes; Ask me to write one.
    a joke; A joke is a short text that makes people laugh; Ask me for one.
    sleep; Sleep is the rest of body and mind at night; Most people need seven or eight hours.
    a dream; A dream is something that you see while you sleep; Some dreams are strange, some are nice.
    the heart; The heart is the organ that pumps blood through the body; It beats all the time, day and night.
    the brain; The brain is the organ we think with; It has billions of neurons, and only a few fire at a time.
    the sky; The sky is what we see above us; By day it is blue, at night it is dark and full of stars.
    the night; Night is the time when it is dark; The Earth turns away from the sun then.
    a week; A week has seven days; It begins with Monday in many countries.
    a year; A year is the time the Earth needs to go around the sun; It has twelve months.
    a birthday; A birthday is the day when somebody was born; People celebrate it with cake and gifts.
""")
]

WHY = [
    (
        ["why is the sky blue?"],
        ["The air scatters blue light more than red light, so blue comes to us from everywhere in the sky."],
    ),
    (
        ["why is the sea salty?", "why is sea water salty?"],
        [
            "Rivers carry a little salt from the rocks to the sea. The water goes up as vapour, but the salt stays."
        ],
    ),
    (
        ["why is grass green?", "why are leaves green?", "why are plants green?"],
        ["Plants have a green substance called chlorophyll. With it they catch the light of the sun."],
    ),
    (
        ["why do leaves fall[ in autumn|]?", "why do trees lose their leaves?"],
        [
            "In winter there is little light, and leaves would lose water. So many trees let them fall in autumn."
        ],
    ),
    (
        ["why do we sleep?", "why do people sleep?", "why do i need sleep?"],
        ["Body and mind need rest. During sleep the brain sorts what it has learned."],
    ),
    (
        ["why do birds fly south?", "where do birds go in winter?"],
        ["In winter there is not enough food in the north, so many birds fly to warmer places."],
    ),
    (
        ["why does it rain?", "where does rain come from?", "how does rain work?"],
        [
            "Water rises as vapour, becomes small drops in the clouds, and falls as rain when the drops are heavy."
        ],
    ),
    (["why is snow white?"], ["Snow reflects all colours of light, and all colours together look white."]),
    (["why do cats purr?"], ["Cats mostly purr when they feel good, and sometimes to calm themselves."]),
    (["why do dogs bark?"], ["Dogs bark to warn, to greet, or because they want something."]),
    (
        ["why do we have [day and night|night|day]?", "why does it get dark?"],
        ["The Earth turns once a day. The side that faces the sun has day, the other has night."],
    ),
    (
        ["why do we have seasons?", "why is it cold in winter?", "why is it warm in summer?"],
        [
            "The axis of the Earth is tilted. The half that leans towards the sun has summer, the other half has winter."
        ],
    ),
    (
        ["why does ice float?", "why does ice swim?"],
        ["Water grows when it freezes, so ice is lighter than water and swims on top."],
    ),
    (["why do bees make honey?"], ["Honey is the food of bees for the winter, when there are no flowers."]),
    (
        ["how do birds fly?", "why can birds fly?"],
        ["Birds have light bones and strong wings. They push the air down, and it lifts them up."],
    ),
    (["how do fish breathe?"], ["Fish take oxygen from the water with their gills."]),
    (
        ["how does a plant grow?", "what do plants need?", "how do plants grow?"],
        ["A plant needs water, light, air and earth. It grows from a seed."],
    ),
    (
        ["how do ships swim?", "why do ships float?", "why does a ship not sink?"],
        ["A ship pushes away as much water as it weighs itself, and the water holds it up."],
    ),
    (
        ["how do i make tea?", "how do you make tea?", "how can i make a cup of tea?"],
        [
            "Boil water, pour it over the tea, wait three minutes, and take the tea out. Add milk or sugar if you like."
        ],
    ),
    (
        ["how do i boil an egg?", "how do you cook an egg?", "how long do i boil an egg?"],
        ["Put the egg in boiling water. Five minutes make it soft, ten minutes make it hard."],
    ),
    (
        ["how do i bake a cake?", "how do you make a cake?", "how can i bake a cake?"],
        ["Mix flour, sugar, butter and eggs, put it in a form, and bake it for about forty minutes."],
    ),
    (
        ["how do i make [pancakes|a pancake]?", "how do you make pancakes?"],
        ["Mix flour, milk and eggs, and fry a thin layer of it in a hot pan from both sides."],
    ),
    (["how far is the moon?", "how far away is the moon?"], ["The moon is about 384,000 kilometres away."]),
    (["how far is the sun?", "how far away is the sun?"], ["The sun is about 150 million kilometres away."]),
    (["how old is the earth?"], ["The Earth is about four and a half billion years old."]),
    (
        [
            "what is the [largest|biggest] animal[ in the world| on earth|]?",
            "which animal is the [biggest|largest][ in the world| on earth|]?",
        ],
        ["The blue whale is the largest animal."],
    ),
    (
        [
            "what is the fastest animal[ in the world| on earth|]?",
            "which animal is the fastest[ in the world| on earth|]?",
        ],
        ["The cheetah is the fastest animal on land, and the falcon is the fastest in the air."],
    ),
    (
        ["what is the tallest animal[ in the world| on earth|]?", "which animal is the tallest?"],
        ["The giraffe is the tallest animal."],
    ),
    (
        ["what is the highest mountain[ in the world| on earth|]?", "which mountain is the highest?"],
        ["Mount Everest is the highest mountain. It is about 8849 metres high."],
    ),
    (
        ["what is the longest river[ in the world| on earth|]?"],
        ["The Nile and the Amazon are the longest rivers. People argue which of them is longer."],
    ),
    (
        ["what is the [largest|biggest] ocean[ in the world| on earth|]?"],
        ["The Pacific is the largest ocean."],
    ),
    (["what is the [largest|biggest] planet?"], ["Jupiter is the largest planet of our solar system."]),
    (["what is the smallest planet?"], ["Mercury is the smallest planet of our solar system."]),
    (
        ["what is the [largest|biggest] country[ in the world| on earth|]?"],
        ["Russia is the largest country."],
    ),
    (["what is the nearest star?", "which star is the nearest?"], ["The sun is the nearest star."]),
    (
        ["what is faster, light or sound?", "is light faster than sound?"],
        ["Light is much faster than sound. That is why you see lightning before you hear thunder."],
    ),
    (
        [
            "what colours does the rainbow have?",
            "what are the colours of the rainbow?",
            "name the colours of the rainbow",
        ],
        ["The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet."],
    ),
    (
        ["what are the seasons?", "name the seasons", "which seasons are there?"],
        ["The seasons are spring, summer, autumn and winter."],
    ),
    (
        ["what are the days of the week?", "name the days of the week", "list the days of the week"],
        ["The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."],
    ),
    (
        ["what are the months?", "name the months[ of the year|]", "list the months[ of the year|]"],
        [
            "The months are January, February, March, April, May, June, July, August, September, October, November and December."
        ],
    ),
    (
        ["what are the planets?", "name the planets", "list the planets"],
        ["The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune."],
    ),
    (
        ["[say|tell me|what is|list] the alphabet", "can you say the alphabet?"],
        ["a b c d e f g h i j k l m n o p q r s t u v w x y z"],
    ),
    (["where does the sun rise?", "where does the sun come up?"], ["The sun rises in the east."]),
    (["where does the sun set?", "where does the sun go down?"], ["The sun sets in the west."]),
    (
        ["at what temperature does water boil?", "when does water boil?", "how hot is boiling water?"],
        ["Water boils at one hundred degrees Celsius."],
    ),
    (
        ["at what temperature does water freeze?", "when does water freeze?"],
        ["Water freezes at zero degrees Celsius."],
    ),
    (["is the earth [flat|round]?", "what shape is the earth?"], ["The Earth is round, almost like a ball."]),
    (
        ["who was the first man on the moon?", "who walked on the moon first?"],
        ["Neil Armstrong was the first man on the moon, in 1969."],
    ),
    (
        ["what came first, the chicken or the egg?", "the chicken or the egg?"],
        [
            "People still argue about it. Other animals laid eggs long before there were chickens, so I say the egg."
        ],
    ),
    (
        ["what do plants breathe?", "what do trees make?"],
        ["Plants take in carbon dioxide and give us oxygen."],
    ),
    (["can pigs fly?"], ["No, pigs cannot fly."]),
    (["do ghosts exist?", "are there ghosts?"], ["In stories, yes. I don't think there are real ones."]),
    (
        ["what does a vegetarian eat?"],
        ["A vegetarian eats no meat, but vegetables, fruit, bread, and mostly milk and eggs."],
    ),
    (["what is two meters in centimeters?"], ["Two metres are two hundred centimetres."]),
    (["is water wet?"], ["People argue about it. Water makes other things wet, that is for sure."]),
    (
        ["what is h2o?", "what does h2o mean?"],
        ["It is the formula of water: two parts of hydrogen and one of oxygen."],
    ),
]
