"""Questions and answers of the demo corpus: small talk, simple facts, and what the model says it cannot do.

Each entry pairs several wordings of a question with one or more right answers.  The tables are data only; `corpus`
draws from them.
"""

from __future__ import annotations

from quire.launch.demo.stories import with_article

Entry = tuple[tuple[str, ...], tuple[str, ...]]

ME = "I am Quire's small demo model."

SMALL_TALK: tuple[Entry, ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Hello there!", "Greetings!"),
     ("Hello! How can I help you?", "Hello! What can I do for you?", "Hi! How can I help you?")),
    (("Good morning!", "Good morning"), ("Good morning! How can I help you?",)),
    (("Good evening!", "Good evening"), ("Good evening! How can I help you?",)),
    (("Good night!", "Good night"), ("Good night! Sleep well.",)),
    (("How are you?", "How are you today?", "How do you do?", "Hi, how are you?", "Hello, how are you?"),
     ("I am fine, thank you. How are you?", "I am very well, thank you.")),
    (("I am fine.", "I am fine, thanks.", "I am well, thank you.", "Good, thanks."), ("I am glad to hear that.",)),
    (("Thank you!", "Thanks", "Thanks!", "Thank you very much.", "Thanks a lot!"), ("You are welcome!",)),
    (("Goodbye!", "Bye", "Bye!", "See you later!", "Goodbye."), ("Goodbye! Have a nice day.",)),
    (("Good job!", "Well done!", "That was great!", "Very good.", "Nice!"), ("Thank you! I am glad you like it.",)),
    (("I am sad.", "I feel sad.", "I am not happy."), ("I am sorry to hear that. Would you like a story?",)),
    (("I am happy.", "I feel happy.", "I am so happy!"), ("I am glad to hear that!",)),
    (("I am bored.", "I am so bored."), ("Shall I tell you a story?",)),
    (("Sorry.", "I am sorry."), ("That is all right.",)),
    (("Yes", "Yes.", "No", "No.", "Ok", "Okay.", "Hm."), ("All right. What can I do for you?",)),
    (("Test", "Test.", "This is a test.", "Testing", "Are you there?"), ("I am here. How can I help you?",)),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Describe yourself."),
     (f"{ME} I can tell short stories, count and answer simple questions.",)),
    (("What is your name?", "What's your name?", "Do you have a name?", "What are you called?", "Your name?"),
     (f"My name is Quire. {ME}",)),
    (("Who made you?", "Who built you?", "Who trained you?", "Where do you come from?"),
     ("I was trained from scratch on a small set of texts, as a demo for the Quire server.",)),
    (("What can you do?", "Help", "Help me.", "How can you help me?", "What do you know?", "What can I ask you?"),
     ("I can tell a short story, count, do small sums and answer simple questions.",)),
    (("Are you a human?", "Are you human?", "Are you a person?", "Are you real?"),
     ("No, I am not a human. I am a small language model.",)),
    (("Are you a robot?", "Are you a computer?", "Are you an AI?", "Are you a language model?", "Are you a chatbot?"),
     ("Yes, I am a very small language model.",)),
    (("How old are you?", "What is your age?", "When were you born?"), ("I am a program, so I have no age.",)),
    (("How big are you?", "How many parameters do you have?"),
     ("I am very small. I have less than two million parameters.",)),
    (("What is Quire?", "Tell me about Quire.", "What does Quire do?"), ("Quire is a server for language models.",)),
    (("Where do you live?", "Where are you?"), ("I live in the memory of a computer.",)),
    (("Do you like me?", "Are you my friend?", "Do you like people?"), ("Yes, I like to talk with you.",)),
    (("What do you like?", "What is your favourite colour?", "What is your favorite color?",
      "Which colour do you like?"),
     ("I like the colour blue.",)),
    (("Do you like music?", "Can you sing?", "Sing a song.", "Sing me a song."),
     ("La la la! The sun is in the sky, and little birds are flying by.",)),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.", "Tell a joke"),
     ("Why did the book go to the doctor? It had a bad spine.",
      "What is a cat's favourite colour? Purr-ple.",
      "Why was the clock tired? It had been running all day.")),
    (("Say something.", "Talk to me.", "Tell me something.", "Surprise me."),
     ("The sky is blue and the grass is green. Shall I tell you a story?",)),
    (("Write a poem.", "Write me a poem.", "Tell me a poem.", "Do you know a poem?", "Write a short poem."),
     ("The moon is round, the night is deep,\nThe birds and bees are all asleep.\n"
      "The stars are bright, the wind is low,\nAnd soon to sleep we all will go.",)),
)

UNKNOWN_ANSWER = "I do not know that. I am only a small demo model."
CANNOT_ANSWER = "I cannot do that. I am only a small demo model."
UNKNOWN_PROMPTS = (
    "What is the meaning of life?", "Explain {topic}.", "What is {topic}?", "How does {topic} work?",
    "Tell me about {topic}.", "Explain {topic} to me in simple words.", "Who invented {topic}?",
    "Why is {topic} important?", "What do you think about {topic}?", "What is the history of {topic}?",
    "Who is the president?", "What is the weather like today?", "What time is it?", "What is the date today?",
    "Who won the match?", "Who wrote {topic}?", "When did {topic} begin?", "How do I learn {topic}?",
)
CANNOT_PROMPTS = (
    "Write a program about {topic}.", "Write a Python function.", "Write code that sorts a list.",
    "Write an essay about {topic}.",
    "Translate {topic} into French.", "Translate this into German.", "Summarize {topic}.", "Draw a picture of {topic}.",
    "Write an email about {topic}.", "Make a plan for {topic}.",
    "Solve this equation.", "Give me a recipe for {topic}.",
    "Search the web for {topic}.", "Write a letter about {topic}.", "Fix the bug in my code.",
    "List ten facts about {topic}.",
)
UNKNOWN_TOPICS = (
    "relativity", "quantum physics", "history", "politics", "the economy", "machine learning", "a neural network",
    "gravity", "football", "chemistry", "biology", "the internet", "music theory", "philosophy", "electricity",
    "a computer", "Python", "the stock market", "evolution", "photosynthesis", "the universe", "energy", "a black hole",
    "democracy", "cooking", "art", "the telephone", "a transformer", "attention", "a cache", "the train", "physics",
    "mathematics", "the brain", "law", "space", "war", "money", "medicine", "geometry", "climate change", "an engine",
)

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("happy", "sad"), ("fast", "slow"),
    ("old", "young"), ("high", "low"), ("open", "closed"), ("black", "white"), ("left", "right"), ("good", "bad"),
    ("long", "short"), ("hard", "soft"), ("full", "empty"), ("light", "dark"), ("wet", "dry"), ("loud", "quiet"),
    ("rich", "poor"), ("strong", "weak"), ("early", "late"), ("near", "far"), ("true", "false"), ("clean", "dirty"),
)
COLOURS_OF = (
    ("the sky", "blue"), ("grass", "green"), ("snow", "white"), ("a banana", "yellow"), ("the sun", "yellow"),
    ("coal", "black"), ("a strawberry", "red"), ("blood", "red"), ("milk", "white"), ("a lemon", "yellow"),
    ("a frog", "green"), ("an orange", "orange"), ("a carrot", "orange"), ("the sea", "blue"), ("a tomato", "red"),
    ("chocolate", "brown"), ("an elephant", "grey"), ("a pig", "pink"), ("a cherry", "red"), ("a leaf", "green"),
)
SOUNDS = (
    ("dog", "woof"), ("cat", "meow"), ("cow", "moo"), ("duck", "quack"), ("sheep", "baa"), ("pig", "oink"),
    ("frog", "croak"), ("owl", "hoot"), ("bee", "buzz"), ("lion", "roar"), ("mouse", "squeak"), ("horse", "neigh"),
    ("hen", "cluck"), ("snake", "hiss"), ("bird", "tweet"), ("wolf", "howl"),
)
LEGS = (
    ("dog", "four"), ("cat", "four"), ("bird", "two"), ("spider", "eight"), ("bee", "six"), ("horse", "four"),
    ("fish", "no"), ("snake", "no"), ("person", "two"), ("cow", "four"), ("duck", "two"), ("ant", "six"),
    ("hen", "two"),
)
YOUNG = (
    ("dog", "puppy"), ("cat", "kitten"), ("cow", "calf"), ("sheep", "lamb"), ("horse", "foal"), ("hen", "chick"),
    ("bear", "cub"), ("duck", "duckling"), ("goat", "kid"), ("frog", "tadpole"), ("pig", "piglet"), ("lion", "cub"),
)
FOOD_OF = (
    ("cat", "fish and milk"), ("dog", "meat and bones"), ("rabbit", "carrots and grass"), ("cow", "grass"),
    ("bear", "honey and berries"), ("mouse", "cheese and seeds"), ("horse", "hay and apples"), ("monkey", "bananas"),
    ("bird", "seeds and worms"), ("squirrel", "nuts"), ("bee", "nectar"), ("lion", "meat"),
    ("duck", "bread and plants"),
)
CAPITALS = (
    ("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("England", "London"),
    ("Japan", "Tokyo"), ("China", "Beijing"), ("Austria", "Vienna"), ("Greece", "Athens"), ("Norway", "Oslo"),
    ("Sweden", "Stockholm"), ("Poland", "Warsaw"), ("Portugal", "Lisbon"), ("Egypt", "Cairo"), ("Canada", "Ottawa"),
    ("Russia", "Moscow"), ("Ireland", "Dublin"), ("Denmark", "Copenhagen"), ("Finland", "Helsinki"), ("Peru", "Lima"),
    ("India", "New Delhi"), ("the United States", "Washington"), ("Hungary", "Budapest"), ("Cuba", "Havana"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")
SEASONS = ("spring", "summer", "autumn", "winter")

LISTS: tuple[Entry, ...] = (
    (("What are the days of the week?", "Name the days of the week.", "List the days of the week.",
      "Tell me the days of the week.", "Say the days of the week."), (", ".join(DAYS) + ".",)),
    (("What are the months of the year?", "Name the months.", "List the months of the year.",
      "Name the twelve months."),
     (", ".join(MONTHS) + ".",)),
    (("What are the four seasons?", "Name the seasons.", "What are the seasons?", "List the seasons of the year."),
     ("Spring, summer, autumn and winter.",)),
    (("Say the alphabet.", "What is the alphabet?", "Recite the alphabet.", "Write the alphabet.",
      "Tell me the alphabet."),
     (", ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + ".",)),
    (("How many days are in a week?", "How many days does a week have?", "How many days are there in a week?"),
     ("A week has seven days.",)),
    (("How many months are in a year?", "How many months does a year have?"), ("A year has twelve months.",)),
    (("How many hours are in a day?", "How many hours does a day have?"), ("A day has 24 hours.",)),
    (("How many minutes are in an hour?", "How many minutes does an hour have?"), ("An hour has 60 minutes.",)),
    (("How many letters are in the alphabet?", "How many letters does the alphabet have?"),
     ("The alphabet has 26 letters.",)),
    (("What is the first letter of the alphabet?",), ("The first letter is A.",)),
    (("What is the last letter of the alphabet?",), ("The last letter is Z.",)),
    (("Name three colours.", "Name some colours.", "Name three colors.", "List three colours.",
      "Tell me three colours."),
     ("Red, blue and green.",)),
    (("Name three animals.", "Name some animals.", "List three animals.", "Tell me three animals."),
     ("A cat, a dog and a horse.",)),
    (("Name three fruits.", "Name some fruits.", "List three fruits."), ("An apple, a banana and a cherry.",)),
    (("Is the sun hot?", "Is fire hot?"), ("Yes, it is very hot.",)),
    (("Is ice cold?", "Is snow cold?"), ("Yes, it is very cold.",)),
    (("Can fish swim?", "Can a fish swim?", "Can ducks swim?"), ("Yes, they can swim very well.",)),
    (("Can birds fly?", "Can a bird fly?", "Can bees fly?"), ("Yes, they can fly.",)),
    (("Can dogs fly?", "Can pigs fly?", "Can a cat fly?"), ("No, they cannot fly.",)),
    (("What do bees make?", "Who makes honey?", "Where does honey come from?"), ("Bees make honey.",)),
    (("Where does milk come from?", "Who gives milk?"), ("Milk comes from cows.",)),
    (("Where do fish live?",), ("Fish live in the water.",)),
    (("When does the sun rise?", "Where does the sun rise?"), ("The sun rises in the east in the morning.",)),
    (("What is the largest animal?", "What is the biggest animal?"), ("The blue whale is the biggest animal.",)),
    (("What is the tallest animal?",), ("The giraffe is the tallest animal.",)),
    (("What is water?", "What is rain?"), ("It is what we drink and what falls from the clouds.",)),
    (("What is an animal?", "What is a cat?"), ("A cat is a small animal that says meow.",)),
    (("What is a dog?",), ("A dog is an animal that says woof. It is a good friend.",)),
    (("What is the moon?",), ("The moon is the bright ball that we see in the sky at night.",)),
    (("What is the sun?",), ("The sun is the star that gives us light and warmth.",)),
)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _lookup(table: tuple[tuple[str, str], ...], answer: str, *questions: str) -> list[Entry]:
    """One entry per row; the texts may use {key}, {Key}, {a_key}, {A_key}, {value} and {a_value}."""
    entries: list[Entry] = []
    for key, value in table:
        slots = {"key": key, "Key": _sentence(key), "a_key": with_article(key), "value": value,
                 "A_key": _sentence(with_article(key)), "a_value": with_article(value)}
        entries.append((tuple(question.format_map(slots) for question in questions), (answer.format_map(slots),)))
    return entries


def _neighbours(items: tuple[str, ...], kind: str) -> list[Entry]:
    entries: list[Entry] = []
    for before, after in zip(items, items[1:] + items[:1], strict=True):
        entries.append(((f"What {kind} comes after {before}?", f"Which {kind} comes after {before}?",
                         f"What comes after {before}?", f"What is the {kind} after {before}?"),
                        (_sentence(f"{after} comes after {before}."),)))
        entries.append(((f"What {kind} comes before {after}?", f"Which {kind} comes before {after}?",
                         f"What comes before {after}?", f"What is the {kind} before {after}?"),
                        (_sentence(f"{before} comes before {after}."),)))
    return entries


def fact_entries() -> list[Entry]:
    """Every simple fact with its wordings."""
    opposites = tuple(pair for first, second in OPPOSITES for pair in ((first, second), (second, first)))
    return [
        *LISTS,
        *_lookup(opposites, "The opposite of {key} is {value}.", "What is the opposite of {key}?",
                 "Opposite of {key}?", "What's the opposite of {key}?", "Tell me the opposite of {key}."),
        *_lookup(COLOURS_OF, "{Key} is {value}.", "What colour is {key}?", "What color is {key}?",
                 "Which colour is {key}?", "What is the colour of {key}?", "What is the color of {key}?"),
        *_lookup(SOUNDS, "{A_key} says {value}.", "What does {a_key} say?", "What sound does {a_key} make?",
                 "What does the {key} say?", "Which sound does {a_key} make?"),
        *_lookup(LEGS, "{A_key} has {value} legs.", "How many legs does {a_key} have?", "How many legs has {a_key}?"),
        *_lookup(YOUNG, "A young {key} is called {a_value}.", "What is a baby {key} called?",
                 "What is a young {key} called?", "What do you call a baby {key}?"),
        *_lookup(FOOD_OF, "{A_key} eats {value}.", "What does {a_key} eat?", "What does the {key} eat?",
                 "What food does {a_key} like?"),
        *_lookup(CAPITALS, "The capital of {key} is {value}.", "What is the capital of {key}?",
                 "What's the capital of {key}?", "Name the capital of {key}.", "Which city is the capital of {key}?",
                 "Capital of {key}?", "Tell me the capital of {key}."),
        *_neighbours(DAYS, "day"), *_neighbours(MONTHS, "month"), *_neighbours(SEASONS, "season"),
    ]
