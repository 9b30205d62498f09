from meshrec.distributed.pieces import Piece, Span, as_tensor, pieces_of


def test_first_source_writes_and_later_ones_add():
    pieces = pieces_of([[Span(0, 0, 4)], [Span(1, 2, 4)]])
    assert pieces == [Piece(0, 0, 4, 0), Piece(1, 0, 2, 2, True), Piece(1, 2, 2, 4)]


def test_neighbours_are_joined():
    assert pieces_of([[Span(0, 0, 4), Span(0, 4, 2)]]) == [Piece(0, 0, 6, 0)]
    assert len(pieces_of([[Span(0, 0, 4), Span(0, 4, 2, 1)]])) == 2
    assert len(pieces_of([[Span(0, 4, 2), Span(0, 0, 4)]])) == 2


def test_as_tensor():
    assert as_tensor([Piece(1, 0, 2, 2, True)]).tolist() == [[1, 0, 2, 2, 1, -1]]
    assert as_tensor([]).shape == (0, 6)
