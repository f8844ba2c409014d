"""Questions far outside of what the model can know, and honest answers to them."""

from __future__ import annotations

from random import Random

from .grammar import chance, pick, say
from .words import CITIES, GIRLS, made_up

_FIELDS = [
    t.strip()
    for t in """quantum mechanics, the French Revolution, bitcoin, Kubernetes, the stock market, economics, philosophy, chemistry, the Roman Empire, string theory, general relativity, photosynthesis, DNA, evolution, inflation, the Second World War,
    the Middle Ages, Buddhism, Islam, Christianity, democracy, capitalism, communism, the European Union, the United Nations, NATO, climate change, nuclear energy, solar panels, blockchain, machine translation, calculus, linear algebra, topology, statistics,
    psychology, anthropology, sociology, medicine, vaccines, antibiotics, cancer, diabetes, the immune system, the Cold War, ancient Egypt, the Vikings, the Renaissance, impressionism, Shakespeare, Goethe, Mozart, Beethoven, Bach, Picasso, Van Gogh, Einstein, Newton,
    Darwin, Napoleon, Caesar, Cleopatra, Plato, Aristotle, Kant, Nietzsche, Marx, Freud, Tesla, Edison, Marie Curie, Alan Turing, Ada Lovelace, Linus Torvalds, Bill Gates, Steve Jobs, Elon Musk, Taylor Swift, the Beatles, Star Wars, Harry Potter, the Lord of the Rings,
    Game of Thrones, Minecraft, Fortnite, the World Cup, the Olympic Games, Formula One, the Super Bowl, the stock price of Apple, JavaScript, TypeScript, React, Docker, SQL, PostgreSQL, Haskell, compilers, operating systems, TCP, HTTP, cryptography, RSA, hash tables, binary trees,
    quicksort, recursion, dynamic programming, transistors, superconductors, black holes, dark matter, the Big Bang, neutrinos, the Higgs boson, tax law, contract law, mortgages, insurance, marketing, accounting, venture capital, yoga poses, keto diets, the history of China,
    the history of Rome, Greek mythology, Norse mythology, the Bible, the Koran, Sanskrit, Latin grammar, Esperanto, haute cuisine, wine, whisky, opera, ballet, jazz, hip hop, chess openings, poker, sailing knots, car engines, electric cars, drones, 3D printing, satellites""".replace(
        "\n", " "
    ).split(",")
]

_TASKS = [
    "can you [drive a car|order a pizza|buy a ticket|read my mail|make a phone call|turn on the light|write code|translate a text|edit a photo|make a video|search the web|do my taxes|check my spelling|read a pdf|fix my code|play chess|remind me of {field}]?",
    "[i need|i want] [a recipe|a plan|a website|an app|a logo|a contract|a presentation] [for|about] {field}",
    "write [me |][a|some] [python|java|javascript|c|c++|rust|go] [code|program|function|script|class|game] that [sorts a list|prints {word}|reads a file|adds two numbers|counts words|downloads a page|draws a circle|plays chess|computes primes|sends mail|finds {word}]",
    "[write|code|program|implement|show me] [quicksort|fizzbuzz|hello world|a web server|a calculator|binary search|tic tac toe|snake|bubble sort|a linked list|a neural network][ in python| in c| in java| in rust|]",
    "how do i [sort a list|read a file|write a loop|open a file|parse json|make a website|write a function|use git|call an api|reverse a string] [in python|in java|in c|in javascript|]?",
    "write [a|some] [python|java|javascript|c|c++|rust] [code|program|function] [for|that does|to solve] {field}",
    "write [an essay|an article|a report|a long text|a blog post] about {field}",
    'translate [this|"{word}"|hello|the sentence] [to|into] [german|french|spanish|chinese|japanese|latin]',
    "summarize {field}",
    "how do i say {word} in [german|french|spanish|japanese|chinese]?",
    "solve [the equation|this equation|the integral] of {word}",
    "write [an email|a letter] to [my boss|my landlord|the bank|{person}]",
    "plan [a trip|my holiday] to {city}",
    "write a [business plan|cover letter|cv|speech]",
    "how do i [fix|repair] [my car|my printer|my phone|my washing machine|a python error|my wifi]?",
    "[what|which] stocks should i buy?",
    "what [medicine|pills] should i take?",
    "find [a restaurant|a hotel|flights] in {city}",
    "book [a flight|a hotel|a table] in {city}",
    "play [some |]music",
    "send [an email|a message] to {person}",
    "set [an alarm|a timer|a reminder]",
    "call {person}",
    "open [the browser|youtube|spotify|a file|my calendar]",
    "draw [me |][a picture|an image] of {field}",
    "write a sql query[ for {word}|]",
    "fix this code: {word}({word2})",
    "debug my program",
    "write a regex for {word}",
    "sort this list in java",
    "how do i [compile|install|configure|deploy] {word}?",
    "what does the error {word} mean?",
    "prove that {word} is {word2}",
    "give me the recipe for {word}",
    "how do i build a [rocket|house|computer|bomb|car]?",
    "how do i hack [a computer|wifi|facebook]?",
    "what are the lottery numbers?",
    "tell me the news",
    "what happened [today|yesterday|in {year}]?",
    "what is in the news?",
]
_FACTS = [
    "who is the [president|king|queen|prime minister|chancellor|leader] of [france|germany|the usa|america|england|spain|china|india|brazil|{land}]?",
    "who won [the world cup|the election|the super bowl|the oscar|the game]{when}?",
    "who [wrote|invented|discovered|painted|composed|founded|directed] {field}?",
    "when [was|did] {field}[ happen| invented| founded| born| start|]?",
    "what is the population of [{city}|{land}|germany|china|europe]?",
    "how many people live in [{city}|{land}|india|the world]?",
    "how [tall|old|high|deep|heavy] is {field}?",
    "how much does [a {word}|{field}] cost?",
    "what is the price of [bitcoin|gold|oil|a {word}]?",
    "who is {person}?",
    "who was {person}?",
    "do you know {person}?",
    "tell me about {person}",
    "what did {person} do?",
    "what is {field}?",
    "explain {field}[ to me|]",
    "tell me about {field}",
    "what do you know about {field}?",
    "how does {field} work?",
    "why is {field} important?",
    "what do you think about {field}?",
    "can you explain {field}?",
    "give me a summary of {field}",
    "what is a {word}?",
    "what is {word}?",
    "what does {word} mean?",
    "explain {word}",
    "define {word}",
    "tell me about {word}",
    "how does a {word} work?",
    "where is {land}?",
    "what is the capital of {land}?",
    "what is the best [film|movie|song|book|phone|laptop|car|restaurant in {city}|university] [of all time|in the world|this year|]?",
    "what is the phone number of {person}?",
    "where does {person} live?",
    "how is the traffic in {city}?",
    "what is the distance between {city} and {land}?",
    "when does the train to {city} leave?",
    "what time does the [shop|bank|museum] open?",
    "who is the author of {word} {word2}?",
    "what year did {person} die?",
]
_ANSWERS = [
    "[I am sorry, |Sorry, |]I [don't|do not] know that. I am [only |]a [very small|tiny] [demo |]model. [Ask a bigger model for that.|A bigger model could help you.|I can tell stories, do small sums and explain PowerInfer.|]",
    "That is [too hard|too much|a bit too difficult] for [me|a tiny model like me]. [I only know simple things.|I can tell you a story instead.|PowerInfer can run bigger models that know more.|]",
    "[Sorry, |]I [can't|cannot] help with that. I am a [tiny|very small] model [and know only simple things|with little knowledge|that comes with PowerInfer as a demo]. [Maybe ask me for a story or a joke?|]",
    "I [have not learned|never learned] that. [My training was only a few minutes long.|I have only twenty million parameters.|My head is small.] [Please ask a bigger model.|]",
]
_ABOUT = [
    "I [don't|do not] know [anything|much] about {topic}. I am [only |]a [very small|tiny] model. [A bigger model could tell you more.|]",
    "{Topic}? [Sorry, I don't know that.|I have never heard of that.|That is not something I know.] I am a [tiny|very small] model[ and know only simple things|].",
    "[Sorry, |]I [never|did not] learn about {topic}. [I know a little about animals, colours and PowerInfer.|Ask a bigger model about that.|I am too small for that.]",
]

GIBBERISH_ANSWERS = [
    "[I did not understand that|Sorry, I don't understand|I am not sure what you mean]. [Could you say it in other words?|Please try again with simple words.|I am a small model; simple sentences work best.]"
]
_STATEMENTS = [
    "my {word} is {word2}",
    "the {word} [went|came] to the {word2}",
    "i [saw|met|bought|found|lost] [a|my|the] {word}[ today| yesterday| in {city}|]",
    "there is a {word} in my {word2}",
    "{person} [told|asked|called] me [today|yesterday]",
    "we [have|need|want] a {word}",
    "i think {field} is [great|strange|important|boring]",
    "i [read|watched|learned] something about {field}",
    "{person} and i [went|are going] to {city}",
    "i work on {field}",
    "i am learning {field}",
]
_STATEMENT_ANSWERS = [
    "[I see|Interesting|Oh, really|That is interesting]. [Tell me more about it.|I don't know much about that, I am a tiny model.|What do you think about it?|How was it?]",
    "[All right|Okay|I understand]. [Can you tell me more?|What happened then?|I am small, so I don't know much about it.]",
]


def _slots(rng: Random) -> dict[str, str]:
    return {
        "field": pick(rng, _FIELDS) if chance(rng, 0.85) else f"{made_up(rng)} {made_up(rng)}",
        "word": made_up(rng),
        "word2": made_up(rng),
        "city": pick(rng, CITIES),
        "land": made_up(rng).capitalize(),
        "person": f"{pick(rng, GIRLS) if chance(rng, 0.3) else made_up(rng).capitalize()} {made_up(rng).capitalize()}",
        "year": str(int(1000 + 1025 * rng.random())),
        "when": pick(rng, ("", " in 2018", " last year", " yesterday", " in 1998")),
    }


def turn(rng: Random) -> tuple[str, str]:
    """An out-of-scope question and an answer."""
    slots = _slots(rng)
    kind = rng.random()
    if kind < 0.30:
        return say(rng, _TASKS, slots), say(rng, _ANSWERS, slots)
    if kind < 0.86:
        template = pick(rng, _FACTS)
        ask = say(rng, [template], slots)
        topic = next(
            (
                slots[s]
                for s in ("field", "person", "word", "land")
                if f"{{{s}}}" in template and slots[s] in ask
            ),
            None,
        )
        if topic and chance(rng, 0.4):
            return ask, say(rng, _ABOUT, {"topic": topic})
        return ask, say(rng, _ANSWERS, slots)
    if kind < 0.95:
        return say(rng, _STATEMENTS, slots), say(rng, _STATEMENT_ANSWERS, slots)
    keys = "asdfghjklqwertzuiopyxcvbnm"
    noise = "".join(pick(rng, keys) for _ in range(3 + int(rng.random() * 10)))
    text = pick(
        rng,
        (
            noise,
            f"{noise} {made_up(rng)}",
            "???",
            "...",
            "!!!",
            f"{made_up(rng)} {made_up(rng)} {made_up(rng)}",
            ".",
            "?",
        ),
    )
    return text, say(rng, GIBBERISH_ANSWERS)
