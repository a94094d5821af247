"""What the features are tried on."""

SHORT = "Once upon a time, the moon and"
LONG = "List what you know about old maps and the sea. " * 8  # many steps, and blocks to share
QUESTION = "<|im_start|>user\nIs ice cold? One word.<|im_end|>\n<|im_start|>assistant\n"
PEOPLE = (
    'A person: {"name": "Bob", "age": 7}\nAnother person: {"name": "Ann", "age": 77}\nA third: '
)
