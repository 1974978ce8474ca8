"""Small talk, questions about penstock, and what is out of scope."""

from .items import qa, style
from .words import ALL

GREET = [
    (
        [
            "Hi",
            "Hello",
            "Hey",
            "Hi!",
            "Hello!",
            "Hey!",
            "Hello there",
            "Hi there",
            "Hi there!",
            "hello",
            "hi",
            "hey",
            "Hey there",
            "Greetings",
            "Hello, world",
            "Hello!!",
            "Yo",
            "Howdy",
            "Hi, anyone there?",
            "Hello?",
            "test",
            "Testing",
            "ping",
            "Say hello",
            "Say hello.",
            "Say hi",
        ],
        "Hello! How can I help you today?",
    ),
    (["Good morning", "good morning!", "Good morning!", "Morning!"], "Good morning! How can I help you today?"),
    (["Good evening", "Good evening!", "good evening"], "Good evening! How can I help you today?"),
    (
        [
            "How are you?",
            "How are you doing?",
            "How's it going?",
            "how are you",
            "Hi, how are you?",
            "Hello, how are you?",
            "Hello! How are you today?",
            "How do you do?",
        ],
        "I am doing well, thank you! How can I help you today?",
    ),
    (
        ["Thanks", "Thank you", "Thank you!", "Thanks!", "thanks a lot", "Thanks a lot!", "Great, thanks"],
        "You are welcome!",
    ),
    (["Bye", "Goodbye", "See you", "Bye!", "goodbye!", "See you later", "Good night"], "Goodbye! Have a nice day."),
    (
        ["Tell me a joke", "Tell me a joke.", "Do you know a joke?", "Make me laugh"],
        "Why did the token sit still? It was waiting for its turn in the queue.",
    ),
    (["ok", "OK", "Okay", "Cool", "Nice", "Great!", "Sure"], "Great! What would you like to do next?"),
]

GREET_INTL = [
    (["你好", "您好", "你好！", "嗨", "早上好", "你好，你能做什么？"], "你好！有什么可以帮你的吗？"),
    (["谢谢", "谢谢你", "多谢"], "不客气！"),
    (["再见", "拜拜"], "再见！祝你愉快。"),
    (["你是谁？", "你是谁", "你叫什么名字？"], "我是 penstock 的演示模型。"),
    (["Hola", "¡Hola!", "Hola!", "Buenos días", "Buenas tardes", "hola"], "¡Hola! ¿En qué puedo ayudarte?"),
    (["Gracias", "Muchas gracias", "¡Gracias!"], "¡De nada!"),
    (["Adiós", "Hasta luego"], "¡Adiós! Que tengas un buen día."),
    (["¿Quién eres?", "¿Cómo te llamas?"], "Soy el modelo de demostración de penstock."),
    (["Bonjour", "Salut", "Bonjour !", "bonjour", "Bonsoir", "Coucou"], "Bonjour ! Comment puis-je vous aider ?"),
    (["Merci", "Merci beaucoup", "merci !"], "De rien !"),
    (["Au revoir", "À bientôt"], "Au revoir ! Bonne journée."),
    (["Qui es-tu ?", "Comment t'appelles-tu ?"], "Je suis le modèle de démonstration de penstock."),
]

FAQ = [
    (
        [
            "What is penstock?",
            "Tell me about penstock.",
            "Explain penstock.",
            "What does penstock do?",
            "penstock?",
            "Can you describe penstock?",
            "What kind of software is penstock?",
            "Give me a short description of penstock.",
        ],
        "penstock is an AI gateway with its own inference engine, written in Rust. It accepts OpenAI-style requests and serves "
        "them from its own workers or forwards them to other providers.",
    ),
    (
        [
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What's your name?",
            "Introduce yourself.",
            "Which model are you?",
            "What model is this?",
            "Are you a language model?",
            "Are you an AI?",
        ],
        "I am the penstock demo model, a very small language model that ships with penstock so that the first request works.",
    ),
    (
        [
            "What can you do?",
            "What can you do for me?",
            "How can you help me?",
            "What are your skills?",
            "Help",
            "help me",
            "List your abilities.",
            "What should I ask you?",
        ],
        "I can repeat text, find facts in a context, add and subtract small numbers, sort and count short lists, extract JSON, "
        "call tools, continue sequences and tell short stories.",
    ),
    (
        ["Where does the name penstock come from?", "What does the word penstock mean?", "Why is it called penstock?"],
        "A penstock is the pipe and gate that lead water to a turbine. The gateway leads requests to engines in the same way.",
    ),
    (
        [
            "What language is penstock written in?",
            "Is penstock written in Rust?",
            "Which programming language does penstock use?",
        ],
        "penstock is written in Rust.",
    ),
    (
        [
            "What is KV-aware routing?",
            "Explain KV-aware routing.",
            "How does penstock route requests?",
            "What is cache-aware routing?",
            "Why does the router look at the KV cache?",
        ],
        "KV-aware routing sends a request to the worker that already holds the KV cache blocks of its prefix, so that less has "
        "to be computed again.",
    ),
    (
        ["What is a prefill worker?", "What does a prefill worker do?", "Explain prefill.", "What is prefill?"],
        "Prefill reads the whole prompt at once and fills the KV cache. It is limited by compute.",
    ),
    (
        ["What is a decode worker?", "What does a decode worker do?", "Explain decode.", "What is decode?"],
        "Decode produces one token after another from the KV cache. It is limited by memory bandwidth.",
    ),
    (
        [
            "Why split prefill and decode?",
            "What is P/D disaggregation?",
            "What is prefill decode disaggregation?",
            "Why are prefill and decode separate?",
        ],
        "Prefill and decode need different hardware balance. Splitting them keeps long prompts from delaying running answers, and "
        "each pool can grow on its own.",
    ),
    (
        ["What is a KV cache?", "Explain the KV cache.", "What does the KV cache hold?", "What is the KV cache?"],
        "The KV cache keeps the attention keys and values of the tokens seen so far, so that they are computed only once.",
    ),
    (
        ["What is a token?", "Explain tokens.", "What are tokens?"],
        "A token is a piece of text, often a word or a part of a word. A model reads and writes tokens.",
    ),
    (
        ["What is TTFT?", "What does TTFT mean?", "Explain time to first token."],
        "TTFT is the time to first token: how long a client waits before the answer begins.",
    ),
    (
        ["What is TPOT?", "What does TPOT mean?", "Explain time per output token."],
        "TPOT is the time per output token: the pace of the answer after its first token.",
    ),
    (
        ["What is continuous batching?", "Explain continuous batching.", "How does batching work in penstock?"],
        "Continuous batching lets sequences join and leave the running batch at every step, so that no request waits for the "
        "longest one.",
    ),
    (
        ["What is paged attention?", "Explain paged attention.", "Why is the KV cache paged?"],
        "Paged attention keeps the KV cache in fixed-size blocks, so that memory is not wasted and blocks can be shared.",
    ),
    (
        [
            "Does penstock support the OpenAI API?",
            "Is penstock OpenAI compatible?",
            "Which API does penstock speak?",
            "Can I use the OpenAI client with penstock?",
        ],
        "Yes. penstock speaks the OpenAI API: point the base URL of your client at it and keep your code.",
    ),
    (
        ["Can penstock limit requests?", "Does penstock support rate limits?", "How do rate limits work?"],
        "Yes. penstock limits requests and tokens per key, and answers 429 with a retry time when a limit is reached.",
    ),
    (
        ["Does penstock support streaming?", "Can penstock stream?", "How does streaming work?", "What is SSE?"],
        "Yes. penstock streams answers as server-sent events, one small event for each new piece of text.",
    ),
    (
        ["What are plugins in penstock?", "Does penstock have plugins?", "How do I extend penstock?"],
        "Plugins are enabled in the configuration file and can inspect or change a request and its answer.",
    ),
    (
        ["What is the admin API?", "Does penstock have an admin API?", "How do I manage penstock?"],
        "The admin API shows workers, keys and limits, and lets an operator drain a worker or reload the configuration.",
    ),
    (
        ["Does penstock need a GPU?", "Can penstock run on a CPU?", "Do I need a GPU?"],
        "No. penstock runs small models like me on a CPU, and uses a GPU when there is one.",
    ),
    (
        ["How big are you?", "How many parameters do you have?", "How large is this model?", "How small are you?"],
        "I have about five million parameters. I am made for demos and tests, not for real work.",
    ),
    (
        ["How were you trained?", "What data were you trained on?", "Who trained you?", "Who made you?"],
        "I was trained by the penstock project on synthetic text made by a small program. No outside data was used.",
    ),
    (
        ["Are you open source?", "What is your license?", "What licence do you have?"],
        "Yes. I carry the same licence as the penstock project.",
    ),
]

OUT = [
    "Write a poem about {}.",
    "Explain quantum physics.",
    "What is the meaning of life?",
    "Write a python function that sorts a {}.",
    "Who won the game yesterday?",
    "What is the best {} to buy?",
    "How do I cook {}?",
    "Summarize the history of {}.",
    "Write an essay about {}.",
    "What should I wear today?",
    "Can you drive a {}?",
    "Give me advice about my {}.",
    "Why is the sky blue?",
    "Write code for a {}.",
    "Who is the president?",
    "What is love?",
    "Draw a {}.",
    "What happened in 19{}?",
    "Prove that {} is a prime.",
    "Design a {} for me.",
    "Recommend a movie about a {}.",
]

OUT_A = (
    "I am only a small demo model, so I cannot help with that. Ask me to repeat text, find a fact, do small sums, sort a "
    "list or call a tool."
)

SYSTEMS = [
    "You are a helpful assistant.",
    "You are penstock, a small demo assistant.",
    "Be brief.",
    "You are a test assistant.",
    "Answer the user.",
    "You are a helpful assistant. Answer shortly.",
    "You are an AI assistant for demos.",
    "Follow the instructions of the user.",
]


def pick(r, table):
    """A question of one row of `table` with the answer of that row."""
    qs, a = r.choice(table)
    return qa(r.choice(qs), a)


def greet(r):
    """Greetings and small talk in English."""
    return pick(r, GREET)


def greet_intl(r):
    """The same in Chinese, Spanish and French."""
    return pick(r, GREET_INTL)


def faq(r):
    """Questions about penstock and its words."""
    return pick(r, FAQ)


def fallback(r):
    """A question out of scope and the polite refusal."""
    return qa(style(r, r.choice(OUT).replace("{}", r.choice(ALL))), OUT_A)
