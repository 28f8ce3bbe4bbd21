from dashboard.fold import Fold


def test_a_fold_is_there_only_while_it_has_something_to_show() -> None:
    fold = Fold("What <it> says")
    assert fold.layout.display == "none"
    head, body = fold.children
    assert head.value == '<details class="mt" open><summary>What &lt;it&gt; says</summary></details>'
    fold.show("<p>words")
    assert (fold.layout.display, body.value, fold.html) == (None, "<p>words", "<p>words")
    fold.show("")
    assert fold.layout.display == "none"
    assert {"mt-fold"} <= set(head._dom_classes)
    assert {"mt-folded"} <= set(body._dom_classes)
