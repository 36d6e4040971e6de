"""What runs inside the boxes: the worker beside the program, the judge beside the tests, and what they say to each other.

These files are bound into a box one by one and import nothing but each other and the standard library, of which as
little as they can: every case starts two interpreters.
"""
