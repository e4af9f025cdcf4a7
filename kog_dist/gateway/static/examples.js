/**
 * Prompts to start with, whose answers are long enough for a speed: 300 tokens and more. The bundled demo model continues Python; a
 * model with a chat template answers questions.
 */

/** @typedef {{title: string, prompt: string}} Example */

/** @type {Example[]} */
export const COMPLETIONS = [
  {
    title: "Fibonacci",
    prompt: '"""Fibonacci numbers, five ways: recursive, iterative, with a cache, with a generator, by matrices."""\n\nimport argparse\nimport functools\n\n\ndef recursive(n):\n',
  },
  {
    title: "Stack",
    prompt: '"""Stacks and queues."""\n\n\nclass Stack:\n    """A last-in, first-out collection of items."""\n\n    def __init__(self, items=()):\n        self._items = list(items)\n\n    def push(self, item):\n        """Put an item on top."""\n        self._items.append(item)\n\n    def pop(self):\n        """Take the item on top away and return it.\n\n        Raises IndexError if there is none.\n        """\n',
  },
  {
    title: "Dates",
    prompt: 'from datetime import date\n\n\ndef parse_date(text: str) -> date:\n    """Parse a date of the form YYYY-MM-DD.\n\n    Raises ValueError if the text is no date.\n    """\n',
  },
  {
    title: "Graph",
    prompt: 'class Graph:\n    """A directed graph with weighted edges."""\n\n    def __init__(self):\n        self._edges = {}\n\n    def add_edge(self, source, target, weight=1):\n',
  },
  {
    title: "Word count",
    prompt: 'import argparse\n\n\ndef main():\n    """Count the words of a file."""\n    parser = argparse.ArgumentParser(description=main.__doc__)\n    parser.add_argument("path")\n',
  },
  {
    title: "LRU cache",
    prompt: 'from collections import OrderedDict\n\n\nclass LRUCache:\n    """Keep the most recently used entries, at most `capacity` of them."""\n\n    def __init__(self, capacity):\n',
  },
];

/** @type {Example[]} */
export const QUESTIONS = [
  {
    title: "Explain a rainbow",
    prompt: "Why does a rainbow have its colours in this order, and why is there sometimes a second one? Explain it to somebody who knows no physics.",
  },
  {
    title: "Plan a weekend",
    prompt: "Plan a weekend in Lisbon for two people who like walking and music: a morning, an afternoon and an evening for each day, as a table.",
  },
  {
    title: "Binary search",
    prompt: "Write a Python module for binary search: find a value, the first and the last of equal ones, and where to insert. Explain each function, then write a unit test for every edge case.",
  },
  {
    title: "Better words",
    prompt: "Make this sound friendlier and shorter, and say what you changed: \"Your request was not processed because the form that you have sent was incomplete. Send it again with all fields.\"",
  },
];
