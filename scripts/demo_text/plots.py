"""The plots of the stories: beats with several wordings each. Slots are explained in `stories.story`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Beat:
    texts: list[str]
    optional: bool = False


@dataclass(frozen=True)
class Plot:
    name: str
    beats: list[Beat]
    endings: list[str]
    questions: list[tuple[list[str], list[str]]] = field(default_factory=list)
    morals: list[str] = field(default_factory=list)


OPENINGS = [
    "Once upon a time, {a trait} {kind} [called|named] {name} lived {where}.",
    "There was once {a trait} {kind} [called|named] {name}, who lived {where}.",
    "{Where}, there lived {a trait} {kind}. The name of the {kind} was {name}.",
    "{Name} was {a trait} {kind} who lived {where}.",
    "A long time ago, {a kind} called {name} lived {where}. {Name} was very {trait}.",
    "Not far from here, {where}, lived {a kind} called {name}. Everyone knew that {name} was {trait}.",
]

ENDINGS = [
    "And that is [the end|the whole story|how it happened].",
    "The end.",
    "And if they have not stopped, they are still [laughing|talking|singing|smiling] [today|about it today].",
    "That [night|evening], {name} slept [very well|better than ever|like a stone].",
    "[From that day on|Since then], {name} and {friend} were the best of friends.",
    "{Name} never forgot that day.",
    "Everyone agreed: {moral}",
]

MORALS = [
    "[A good friend|One good friend] is worth more than [gold|a treasure|a {thing}].",
    "[It is good to|We should] help each other.",
    "[Small|Little] steps can take you [far|a long way].",
    "[Asking for help|To ask for help] is not a weakness.",
]

_TALK = Beat(
    [
        '"[Do not worry|Do not be sad|Be brave]," said {friend}. "[I am here|We can do it together|I will stay with you]."',
        '"[What is the matter|What happened|Why do you look so sad]?" asked {friend}. So {name} told the whole story.',
        '"[Come with me|Let us try it|I have an idea]," said {friend} with a smile.',
        '"I [believe in you|know that you can do it|trust you], {name}," said {friend}.',
    ],
    optional=True,
)
_WEATHER = Beat(
    [
        "[Outside|All around], there was nothing but {weather}.",
        "The {weather} [came early|made everything quiet|did not stop] that day.",
        "It was a day of {weather}, and {name} [hummed|sang|whistled] a little song.",
        "[Later|Soon] the {weather} came, but {name} did not [mind|care|stop].",
    ],
    optional=True,
)
_REST = Beat(
    [
        "They stopped to eat some {food}.",
        "They rested [for an hour|under a tree|for a while] and shared {food}.",
        "{Friend} had brought {food}, and it tasted wonderful.",
        "After [a little|some] {food} they felt [strong|much better|brave] again.",
    ],
    optional=True,
)

_MEET = Beat(
    [
        "On the way {he} met {friend}, {a friendkind}, who [was looking for company|had nothing to do|loved adventures].",
        'Then {he} met {a friendkind}. "I am {friend}," said the {friendkind}. "[May I come with you|Can I help you|What are you doing]?"',
        "Luckily, {his} friend {friend} the {friendkind} [came by|lived nearby|was at home] and [wanted to help|offered to help].",
        "{He} asked {friend}, {a friendkind} who [knew a lot|was very wise|lived next door], for help.",
        "A [friendly|kind|clever] {friendkind} called {friend} [saw|heard|noticed] {him} and came closer.",
    ]
)

PLOTS = [
    Plot(
        "lost",
        [
            Beat(
                [
                    "One [morning|day|evening], {name} could not find {his} {thing}.",
                    "One [morning|day|evening], {name} lost {his} {thing}.",
                    "{Name} had {a thing} and loved it very much. But one [day|morning] it was gone.",
                ]
            ),
            Beat(
                [
                    "{He} looked [under the bed|behind the door|in every corner], but the {thing} was not there.",
                    "{He} searched [all day|for hours|everywhere], but {he} did not find it.",
                    "{He} [cried a little|was very sad|could not sleep], because the {thing} was a gift from {his} [grandmother|grandfather|mother|father].",
                ]
            ),
            _MEET,
            _TALK,
            Beat(
                [
                    "Together they followed [small footprints|a line of crumbs|a strange sound] [to the old well|to a big tree|along the path].",
                    "They asked [a bird|an old owl|the wind|{number} ants], and at last they got [a clue|an answer].",
                    "They looked [on the roof|behind the hill|in the tall grass|near the water], step by step.",
                ]
            ),
            _WEATHER,
            Beat(
                [
                    "There it was: the {thing} lay [in a nest|between two stones|under some leaves|in the grass].",
                    'Then {friend} [shouted|called]: "I see it!" The {thing} was [hanging in a tree|lying in the mud|behind a stone].',
                ]
            ),
        ],
        [
            "{Name} was so happy that {he} [danced|jumped for joy|laughed out loud], and {friend} [danced|jumped|laughed] too.",
            "{Name} [hugged|thanked] {friend} and took the {thing} home.",
            "{Name} got {his} {thing} back, and {friend} got [a big hug|some {food}|a warm thank you].",
        ],
        [
            (
                [
                    "what did {name} lose?",
                    "what was lost?",
                    "what did {name} look for?",
                    "what were they looking for?",
                ],
                ["{Name} lost {his} {thing}.", "It was {a thing}.", "They were looking for the {thing}."],
            )
        ],
        ["Together we find what we cannot find alone.", "A friend helps you to look."],
    ),
    Plot(
        "storm",
        [
            Beat(
                [
                    "One night a [big|terrible|wild] storm came.",
                    "One evening the sky became black and a storm began.",
                    "In the middle of the night, thunder woke {name}.",
                ]
            ),
            Beat(
                [
                    "The wind [blew|howled] and the rain [fell|hammered] on the roof.",
                    "[Trees bent|Windows shook|The ground shook], and the light went out.",
                    "{Name} was afraid, but {he} [lit a candle|took a lamp|looked outside].",
                ]
            ),
            Beat(
                [
                    "Then {he} heard someone [call|cry] for help. It was {friend}, {a friendkind}, who [was lost in the dark|could not find the way|was cold and wet].",
                    "Outside, {friend} the {friendkind} was [lost|all alone|stuck in the mud].",
                ]
            ),
            Beat(
                [
                    "{Name} took {his} {thing} and ran [out|into the storm|outside].",
                    "{Name} [waved|held up] the {thing} so that {friend} could see where to go.",
                    "Without waiting, {name} took the {thing} and [went out|opened the door].",
                ]
            ),
            _TALK,
            Beat(
                [
                    "Step by step, {friend} came [closer|nearer], until they [reached the door|were safe|stood in the warm room].",
                    "They held on to each other and walked [slowly|carefully] home.",
                ]
            ),
            Beat(
                [
                    "{Name} made {food}, and they [waited|sat by the fire] until the storm was over.",
                    "Inside it was warm, and they ate {food}.",
                ],
                optional=True,
            ),
        ],
        [
            'In the morning the sun [was shining|came out], and {friend} said: "You [saved me|are a hero|are very brave], {name}."',
            "When the storm was over, {name} and {friend} were friends.",
            "The next day everyone [talked about|thanked] {name}, the brave {kind}.",
        ],
        [
            (
                ["what happened in the night?", "why was {name} afraid?"],
                ["There was a big storm.", "A big storm came in the night."],
            ),
            (
                ["who was lost?", "who did {name} save?", "who called for help?"],
                ["It was {friend} the {friendkind}.", "{Friend}, {a friendkind}, was lost in the storm."],
            ),
            (
                ["what did {name} take with {him}?", "what did {name} use?"],
                ["{He} took {his} {thing}.", "{Name} used the {thing}."],
            ),
        ],
        ["To be brave means to help although you are afraid.", "A small light can help in a big storm."],
    ),
    Plot(
        "learn",
        [
            Beat(
                [
                    "{Name} wanted to learn to {skill}, but it was [hard|very difficult|not easy].",
                    "{Name} had one wish: to {skill} like {friend}, {a friendkind}.",
                ]
            ),
            Beat(
                [
                    "Every time {he} tried, something went wrong.",
                    "The first time was [a disaster|funny|terrible]: {he} fell into [the water|a bush|a bucket].",
                    "The others laughed, and {name} almost gave up.",
                ]
            ),
            Beat(
                [
                    'But {friend} the {friendkind} said: "[Try again|Nobody can do it at once|I also fell many times]."',
                    "But {friend}, a patient {friendkind}, came every [day|morning|evening] to help.",
                ]
            ),
            Beat(
                [
                    "So {name} practised [every day|for {number} weeks|each morning], in {weather} and in the dark.",
                    "{Name} tried [again and again|ten times a day|every single day].",
                    "{He} practised with {his} {thing}, which [brought {him} luck|gave {him} courage].",
                ]
            ),
            _REST,
            Beat(
                [
                    "After {number} weeks something changed.",
                    "Then, one [sunny|quiet] morning, it worked.",
                    "Slowly it became easier.",
                ]
            ),
        ],
        [
            "At last {name} could do it, and everybody [clapped|cheered|came to see it].",
            '"I can do it!" [shouted|called|cried] {name}, and {friend} was very proud.',
            "In the end {name} was even better than {friend}, and both laughed about it.",
        ],
        [
            (
                ["was it easy for {name}?", "was it easy?"],
                [
                    "No, it was hard at first, but {name} practised a lot.",
                    "No. {Name} had to practise a lot.",
                ],
            ),
            (["how long did {name} practise?"], ["{Name} practised for a long time and did not give up."]),
        ],
        ["Practice makes it easier.", "If you do not give up, you can learn almost anything."],
    ),
    Plot(
        "map",
        [
            Beat(
                [
                    "One day {name} found an old map [in a book|under the floor|in a bottle|behind a picture].",
                    "One day the wind blew an old map in front of {name}'s [feet|door|window].",
                ]
            ),
            Beat(
                [
                    "It showed the way to a treasure [behind {number} hills|near an old oak|under a waterfall|deep in the ground].",
                    "On the map there was a red cross, {number} [hills|rivers|trees] away.",
                ]
            ),
            _MEET,
            Beat(
                [
                    "They [walked|travelled] for {number} days.",
                    "They crossed a [river|field|bridge] and climbed [a wall|a hill|over big rocks].",
                    "The way was long, and {weather} made it harder.",
                ]
            ),
            _REST,
            _TALK,
            Beat(
                [
                    "At the red cross they began to dig.",
                    "When they [came to|reached] the place, they found a [door|hole|chest] in the ground.",
                    "Under a [flat|heavy|round] stone they found a box.",
                ]
            ),
            Beat(
                [
                    "But there was no gold in it, only {a thing}.",
                    "In it they found {a thing}. [Nothing else|No gold, no silver].",
                    "It was full of gold, and on top lay {a thing}.",
                ]
            ),
        ],
        [
            '{Name} smiled. "The best part was the way, and that I had you with me," {he} said to {friend}.',
            "They took the {thing} home and [put it where everyone could see it|showed it to everyone].",
            '"We will share it," said {name}, and so they did.',
        ],
        [
            (
                ["what did they find?", "what was the treasure?", "what was in the box?"],
                ["They found {a thing}.", "It was {a thing}."],
            ),
            (
                ["what did {name} find first?", "how did it start?", "what did {name} find?"],
                ["{Name} found an old map.", "It started with an old map."],
            ),
        ],
        ["The way can be better than the treasure.", "A treasure is best when it is shared."],
    ),
    Plot(
        "dark",
        [
            Beat(
                [
                    "{Name} had a secret: {he} was afraid of the [dark|night].",
                    "There was one thing that {name} did not like at all: the dark.",
                    "Everyone thought that {name} was not afraid of anything. But {he} was afraid of the dark.",
                ]
            ),
            Beat(
                [
                    "Every [night|evening] {he} [hid under a blanket|left a candle burning|could not sleep].",
                    "When the sun went down, {he} [closed all the windows|ran home|began to shake].",
                ]
            ),
            Beat(
                [
                    'One evening {friend}, {a friendkind}, [came to visit.|knocked on the door.|asked: "Will you come out with me?"]',
                    "{Friend} the {friendkind} noticed it and [wanted to help|had an idea].",
                ]
            ),
            Beat(
                [
                    '{Friend} gave {him} {a thing} and said: "Hold it when you are afraid."',
                    '"Take my {thing}," said {friend}. "It [helps|has always helped] me."',
                ]
            ),
            Beat(
                [
                    "Together they went outside and [looked up|sat on the grass|waited].",
                    "They walked [slowly|hand in hand] into the night.",
                ]
            ),
            Beat(
                [
                    "There were thousands of stars, and [an owl|a cricket|the wind] was singing.",
                    "The dark was not empty: {he} saw [fireflies|stars|the moon] and heard [frogs|crickets|an owl].",
                ]
            ),
        ],
        [
            "From that night on, {name} was not afraid any more.",
            '"The dark is beautiful," said {name}, and {friend} nodded.',
            "Now {name} goes out every [night|evening] to [count|look at] the stars.",
        ],
        [
            (
                ["what was {name} afraid of?", "why could {name} not sleep?"],
                ["{Name} was afraid of the dark."],
            ),
            (
                ["what did {friend} give {name}?", "what did {name} get?"],
                ["{Friend} gave {him} {a thing}.", "{He} got {a thing} from {friend}."],
            ),
        ],
        ["What we know, we do not fear.", "It is all right to be afraid."],
    ),
    Plot(
        "share",
        [
            Beat(
                [
                    "It was a [hard|cold|long] winter, and there was little to eat.",
                    "That year there was not much food {where}.",
                ]
            ),
            Beat(
                [
                    "{Name} had only {number} [pieces of bread|nuts|apples] left.",
                    "{Name} had [some|a small bag of] {food}, and nothing more.",
                ]
            ),
            Beat(
                [
                    'Then {friend}, {a friendkind}, knocked on the door. "I [am so hungry|have not eaten for {number} days]," said {friend}.',
                    "One evening {friend} the {friendkind} stood at the door, [tired|thin|cold] and hungry.",
                ]
            ),
            Beat(
                [
                    "{Name} thought about it for [a moment|a while]. Then {he} [gave {friend} half|shared everything].",
                    '"Come in," said {name}. "We will share."',
                    "{Name} did not think long and shared {his} food.",
                ]
            ),
            _WEATHER,
            Beat(
                [
                    "In return {friend} gave {him} {a thing}.",
                    "{Friend} had nothing but {a thing}, and left it [on the table|as a gift].",
                ]
            ),
            Beat(
                [
                    "{Name} did not know it yet, but the {thing} [was magic|would bring luck|was very old and precious].",
                    "The {thing} [began to shine|was warm|made a soft sound].",
                ],
                optional=True,
            ),
        ],
        [
            "When spring came, {friend} came back with a basket full of {food}, and they had a feast.",
            "And from then on there was always enough {food} in {name}'s house.",
            'In spring, {friend} came back and said: "I will never forget what you did, {name}."',
        ],
        [
            (
                ["what did {friend} give {name}?", "what was the gift?"],
                ["{Friend} gave {him} {a thing}.", "The gift was {a thing}."],
            ),
            (
                ["why was {friend} at the door?", "what did {friend} want?"],
                ["{Friend} was hungry.", "{Friend} was hungry and asked for food."],
            ),
        ],
        ["Who shares has more in the end.", "Kindness comes back."],
    ),
    Plot(
        "repair",
        [
            Beat(
                [
                    "{Name} loved to [repair|build|invent] things.",
                    "Whenever something was broken, people asked {name}.",
                ]
            ),
            Beat(
                [
                    'One day {friend}, {a friendkind}, came with a broken {thing}. "Can you repair it?"',
                    "One day {friend} the {friendkind} brought {a thing}. It was broken into {number} pieces.",
                ]
            ),
            Beat(
                [
                    "{Name} worked [all night|for {number} days|until the sun came up].",
                    "{Name} tried [glue|a hammer|wire and string], but nothing [worked|helped].",
                    "It was harder than it looked.",
                ]
            ),
            Beat(
                [
                    "One small piece was missing.",
                    "A tiny part was gone, and without it the {thing} did not work.",
                ]
            ),
            _TALK,
            Beat(
                [
                    "So they made the missing piece out of [wood|an old button|a nutshell|a spoon].",
                    "Then {name} had an idea and used [a button from {his} coat|a pebble|a piece of string].",
                ]
            ),
        ],
        [
            "The {thing} worked again, even better than before, and {friend} was [very happy|full of joy].",
            '"Now it is half mine and half yours," said {name}, and they both laughed.',
            "When the {thing} worked again, {friend} [danced|cheered|clapped], and {name} was proud.",
        ],
        [
            (
                ["what was broken?", "what did {name} repair?", "what did {friend} bring?"],
                ["It was {a thing}.", "{Friend} brought a broken {thing}.", "{Name} repaired the {thing}."],
            )
        ],
        ["What is broken can often be repaired.", "A small piece can be important."],
    ),
    Plot(
        "race",
        [
            Beat(
                [
                    "Every year there was a big race {where}.",
                    "One day a race was announced, and the prize was {a thing}.",
                ]
            ),
            Beat(
                [
                    "{Name} wanted to win, but {friend}, {a friendkind}, was [much faster|very strong|the favourite].",
                    "Nobody believed that {name} could win against {friend} the {friendkind}.",
                ]
            ),
            Beat(
                [
                    "The race began, and {friend} was far ahead.",
                    '"Ready, steady, go!" At once {friend} was in front.',
                ]
            ),
            Beat(
                [
                    "But halfway, {friend} [fell|slipped|got stuck in the mud] and could not get up.",
                    "But then {friend} [hurt a foot|lost the way|fell into a hole].",
                ]
            ),
            Beat(
                [
                    "{Name} could have [run past|won now]. But {he} stopped to help.",
                    '{Name} stopped at once. "[Hold on to me|Take my hand|I will help you]," {he} said.',
                ]
            ),
            _WEATHER,
            Beat(
                [
                    "They walked to the end together.",
                    "Side by side they [crossed the line|came to the finish].",
                ]
            ),
        ],
        [
            "Both were last, but everybody cheered, and they got the {thing} together.",
            "Nobody remembers who won that day, but everyone remembers {name}.",
            "The judge gave the prize, {a thing}, to both of them.",
        ],
        [
            (
                ["who won?", "who won the race?", "did {name} win?"],
                ["{Name} stopped to help {friend}, and they finished together."],
            ),
            (["why did {name} stop?"], ["{Name} stopped to help {friend}."]),
            (["what was the prize?"], ["The prize was {a thing}."]),
        ],
        ["Helping is better than winning.", "There are things more important than winning."],
    ),
    Plot(
        "sound",
        [
            Beat(
                [
                    "Every night {name} heard a strange sound.",
                    "One night a strange [sound|noise|song] woke {name}.",
                ]
            ),
            Beat(
                [
                    "It came from [under the floor|behind the wall|the roof|far away|the old well].",
                    "It sounded like [a small bell|someone singing|a soft drum|a long sigh].",
                ]
            ),
            Beat(
                [
                    '"[Is it a ghost|What can it be|Who is there]?" [thought|asked|whispered] {name}.',
                    "Some said it was a ghost. {Name} wanted to know.",
                ]
            ),
            _WEATHER,
            Beat(
                [
                    "So {he} took a lamp and followed the sound.",
                    "After {number} steps {he} stopped. The sound was very near.",
                    "{He} went [slowly|on tiptoe], closer and closer.",
                ]
            ),
            Beat(
                [
                    "And there sat {friend}, {a friendkind}, who was playing with {a thing}.",
                    "It was only {friend}, {a friendkind}, and the sound came from {a thing}.",
                ]
            ),
            Beat(
                [
                    '"I am sorry," said {friend}. "I [cannot sleep|am so alone|have no friends] at night."',
                    '"Nobody ever visits me," said {friend}.',
                ]
            ),
        ],
        [
            "From then on {name} came every [evening|night], and they made music together.",
            '{Name} laughed. "Then we will be friends," {he} said.',
            "Since that night nobody {where} was alone any more.",
        ],
        [
            (
                ["what was the sound?", "where did the sound come from?", "what made the sound?"],
                ["The sound came from {a thing}.", "It was {friend}, who was playing with {a thing}."],
            )
        ],
        ["Look before you are afraid.", "Many strange things have a simple reason."],
    ),
    Plot(
        "gift",
        [
            Beat(
                [
                    "Soon it was {friend}'s birthday. {Friend} was {a friendkind} and {name}'s best friend.",
                    "The birthday of {his} friend {friend}, {a friendkind}, was only {number} days away.",
                ]
            ),
            Beat(
                [
                    "{Name} wanted to give {friend} something special, but {he} had no money.",
                    '"What shall I give?" {name} thought and thought.',
                ]
            ),
            Beat(
                [
                    "{He} looked at {a thing} in the shop, but it was too expensive.",
                    "{Friend} had always dreamed of {a thing}.",
                ]
            ),
            Beat(
                [
                    "So {he} decided to make {a thing} with {his} own hands.",
                    "Then {he} knew it: {he} would make {a thing}.",
                ]
            ),
            Beat(
                [
                    "{He} needed [wood|paper|glue|wool] and a lot of [patience|time].",
                    "It took {number} days, and {his} hands were [full of paint|tired|sore].",
                ]
            ),
            _WEATHER,
            Beat(
                [
                    "It was not perfect: it was a little [crooked|too big|too small].",
                    "When it was done, it looked [wonderful|funny|a bit strange].",
                ],
                optional=True,
            ),
        ],
        [
            "When {friend} saw the {thing}, {his_friend} eyes were shining.",
            '"This is the best gift I ever got," said {friend}.',
            "{Friend} [was so happy|laughed and cried] and kept the {thing} for ever.",
        ],
        [
            (
                ["what did {name} make?", "what was the gift?", "what did {friend} get?"],
                ["{Name} made {a thing}.", "The gift was {a thing}.", "{Friend} got {a thing}."],
            ),
            (
                ["why did {name} make a gift?", "whose birthday was it?"],
                ["It was the birthday of {friend}.", "Because it was {friend}'s birthday."],
            ),
        ],
        ["A gift made by hand comes from the heart.", "The best gifts cost time, not money."],
    ),
    Plot(
        "sick",
        [
            Beat(
                [
                    "One day {friend}, {a friendkind}, became ill.",
                    "{Name} was worried: {his} friend {friend}, {a friendkind}, was very ill.",
                ]
            ),
            Beat(
                [
                    '"Only a [blue|silver|red] flower can help," said the doctor. "It grows [on the top of the mountain|beyond the river|in the deepest valley]."',
                    'The doctor said: "You need a tea made of moon leaves. They grow [far away|behind {number} hills]."',
                ]
            ),
            Beat(
                [
                    "{Name} packed {his} {thing} and some {food} and left at once.",
                    "Without a word {name} took {his} {thing} and went.",
                ]
            ),
            Beat(
                [
                    "The way was [steep|dangerous|dark], and {weather} made it harder.",
                    "{He} had to cross [a broken bridge|a wild river|a field of ice].",
                ]
            ),
            Beat(
                [
                    "There the {thing} was [useful|a great help]: with it, {he} could go on.",
                    "When {he} was lost, the {thing} showed {him} the way.",
                ]
            ),
            _WEATHER,
            Beat(
                [
                    "At last {he} found [what {he} was looking for|the plant] and ran home.",
                    "{He} picked it carefully and came back after {number} days.",
                ]
            ),
        ],
        [
            "{Friend} drank the tea, slept, and the next morning {friend} was well again.",
            'A day later {friend} was laughing again. "Thank you, {name}!"',
            "{Friend} got well, and they celebrated with {food}.",
        ],
        [
            (
                ["who was ill?", "who was sick?"],
                ["{Friend} the {friendkind} was ill.", "It was {friend}, {a friendkind}."],
            ),
            (
                ["what did {name} take with {him}?", "what helped {name}?"],
                ["{He} took {his} {thing}.", "The {thing} helped {him}."],
            ),
        ],
        ["For a friend no way is too long."],
    ),
    Plot(
        "newcomer",
        [
            Beat(
                [
                    "One day somebody new came: {friend}, {a friendkind}.",
                    "One day {friend}, {a friendkind}, moved into the house next door.",
                ]
            ),
            Beat(
                [
                    "Nobody wanted to play with {friend}, because {friend} was [different|very quiet|a stranger].",
                    "The others [whispered|laughed] and kept away.",
                ]
            ),
            Beat(
                [
                    "{Name} was [not sure|shy] at first too.",
                    "{Name} watched from [the window|behind a tree] and saw how sad {friend} was.",
                ]
            ),
            Beat(
                [
                    'Then {he} took {his} {thing} and went over. "[Hello|Good morning]! Do you want to play?"',
                    'Then {name} brought {a thing} as a present. "Welcome!" {he} said.',
                ]
            ),
            _TALK,
            Beat(
                [
                    "{Friend} could [tell wonderful stories|make the best {food}|whistle with two fingers|do magic tricks].",
                    "It turned out that {friend} knew {number} [songs|games|languages].",
                ]
            ),
        ],
        [
            "Soon everyone came to [listen|play|look], and nobody was a stranger any more.",
            "Now they meet every day, and the {thing} belongs to both.",
            '"I am so glad that you came," said {name}.',
        ],
        [
            (
                ["who was new?", "who came?", "who moved in?"],
                ["{Friend}, {a friendkind}, was new.", "It was {friend}, {a friendkind}."],
            ),
            (["what did {name} bring?"], ["{Name} brought {his} {thing}.", "{He} brought the {thing}."]),
        ],
        ["Every friend was a stranger once.", "Say hello first."],
    ),
    Plot(
        "wish",
        [
            Beat(
                [
                    "One day {name} found {a thing}. When {he} cleaned it, {a friendkind} [jumped out|appeared].",
                    "When {name} picked up {a thing} from the ground, a voice came out of it. It was {a friendkind}.",
                ]
            ),
            Beat(
                [
                    '"I am {friend}. You have {number} wishes," it said.',
                    '"My name is {friend}," it said. "You have one wish."',
                ]
            ),
            Beat(
                [
                    "{Name} thought about [gold|a palace|a mountain of {food}].",
                    "{Name} thought for {number} [hours|days]. [A big house|A new coat|Gold]? No.",
                ]
            ),
            Beat(
                [
                    'Then {he} looked at {friend} and asked: "What would you wish for?"',
                    '"And what do you want, {friend}?" {he} asked at last.',
                ]
            ),
            Beat(
                [
                    '"I would like to be free," said {friend} quietly.',
                    '"Nobody has ever asked me that," said {friend}. "I want to see the [sea|world|stars]."',
                ]
            ),
            _WEATHER,
            Beat(['"Then that is my wish," said {name}.', '"I wish that for you," said {name} at once.']),
        ],
        [
            "So {friend} became free, and stayed anyway, because they were friends now.",
            "There was a flash, and {friend} was free and laughed.",
            "And {name} got something better than gold: a friend.",
        ],
        [
            (
                ["what did {name} find?", "where did {friend} come from?"],
                ["{Name} found {a thing}.", "{Friend} came out of {a thing}."],
            ),
            (
                ["what was the wish?", "what did {name} wish for?"],
                ["{Name} wished that {friend} would be free."],
            ),
        ],
        ["To give is better than to have.", "It is good to ask what others want."],
    ),
    Plot(
        "build",
        [
            Beat(
                [
                    "One day {name} had a big plan: {he} wanted to build a [boat|tree house|bridge|flying machine|little theatre].",
                    "{Name} wanted to build a [bridge|boat|tree house|tower], the best one {where}.",
                ]
            ),
            Beat(
                [
                    "But alone it was [too hard|impossible]. The first one [fell down|broke|sank] after {number} minutes.",
                    "{He} began alone, but soon everything [broke|fell down].",
                ]
            ),
            _MEET,
            Beat(
                [
                    "{Friend} was good at [drawing plans|carrying wood|measuring], and {name} was good at [hammering|painting|climbing].",
                    "One held the wood, the other held the nails.",
                ]
            ),
            _REST,
            Beat(
                [
                    "In the end one thing was missing. {Friend} brought {a thing} and put it on top.",
                    "At the very top they put {a thing}.",
                ]
            ),
        ],
        [
            "It was [finished|done], and it was [beautiful|the best one in the world].",
            "When it was ready, they invited everyone and celebrated with {food}.",
            '"We did it," said {name}, and {friend} said: "We, yes."',
        ],
        [
            (
                ["what was on top?", "what did they put on top?", "what did {friend} bring?"],
                ["They put {a thing} on top.", "{Friend} brought {a thing}."],
            ),
            (
                ["could {name} do it alone?", "did {name} do it alone?"],
                ["No, {friend} helped.", "No. {Friend} the {friendkind} helped {him}."],
            ),
        ],
        ["Together we build what we cannot build alone."],
    ),
]
