"""What runs inside the boxes: the worker beside the program, the judge beside the tests, and their words.

These files are compiled here and handed to an interpreter as they are. They import nothing but each other and the
standard library, of which as little as they can: every case starts two interpreters.
"""
