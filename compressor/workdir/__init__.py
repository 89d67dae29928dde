"""The hidden folder beside an output in which it is made: the journal, one file per decoder layer, one lock."""
