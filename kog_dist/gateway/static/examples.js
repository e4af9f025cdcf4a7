/** Prompts to start with. The bundled demo model continues Python; a model with a chat template answers questions. */

/** @typedef {{title: string, prompt: string}} Example */

/** @type {Example[]} */
export const COMPLETIONS = [
  {
    title: "Fibonacci",
    prompt: 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number, counting from zero."""\n',
  },
  {
    title: "A stack",
    prompt: 'class Stack:\n    """A last-in, first-out collection of items."""\n\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n',
  },
  {
    title: "Parse a date",
    prompt: 'from datetime import date\n\n\ndef parse_date(text: str) -> date:\n    """Parse a date of the form YYYY-MM-DD.\n\n    Raises ValueError if the text is no date.\n    """\n',
  },
  {
    title: "Retry with backoff",
    prompt: 'import time\n\n\ndef retry(function, attempts=5, delay=0.1):\n    """Call `function` until it succeeds, waiting twice as long after each failure."""\n',
  },
  {
    title: "Command line",
    prompt: 'import argparse\n\n\ndef main():\n    """Count the words of a file."""\n    parser = argparse.ArgumentParser(description=main.__doc__)\n    parser.add_argument("path")\n',
  },
  {
    title: "LRU cache",
    prompt: 'from collections import OrderedDict\n\n\nclass LRUCache:\n    """Keep the most recently used entries, at most `capacity` of them."""\n\n    def __init__(self, capacity):\n',
  },
];

/** @type {Example[]} */
export const QUESTIONS = [
  { title: "Binary search", prompt: "Write a Python function that finds a value in a sorted list by binary search, with tests." },
  { title: "Game of Life", prompt: "Write Conway's Game of Life for a terminal, in Python without dependencies." },
  { title: "Tokenizer", prompt: "Write a tokenizer for arithmetic expressions in JavaScript and explain each step." },
  { title: "Ring buffer", prompt: "Write a lock-free single-producer ring buffer in C and say which memory order each access needs." },
];
