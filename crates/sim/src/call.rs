//! `eth_call` for the view functions an indexer asks: owners, balances, names, interfaces, metadata.

use alloy_primitives::{U256, keccak256};

use crate::block::{put_text, token_uri};
use crate::book::{Book, Contract, Standard, topic_of};
use crate::hexed::word;
use crate::truth::Balances;

/// Why a call gives no value.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CallError {
    /// The contract reverted with this reason.
    Reverted(&'static str),
    /// The call data is cut or malformed.
    BadInput,
}

/// Answers `input` sent to `to` with the state `balances`. No contract there gives empty bytes, as on chain.
pub(crate) fn view(
    book: &Book,
    balances: &Balances,
    to: &[u8; 20],
    input: &[u8],
) -> Result<Vec<u8>, CallError> {
    let Some(index) = book.find_contract(to) else { return Ok(Vec::new()) };
    let contract = book.contract(index);
    let (selector, arguments) = input.split_at_checked(4).ok_or(CallError::BadInput)?;
    let is = |signature: &str| keccak256(signature)[..4] == *selector;
    let account_at = |position: usize| -> Result<Option<u32>, CallError> {
        let word = word_at(arguments, position)?;
        let address: [u8; 20] = word[12..].try_into().map_err(|_| CallError::BadInput)?;
        Ok(book.find_account(&address))
    };
    let number_at = |position: usize| -> Result<U256, CallError> {
        Ok(U256::from_be_bytes(word_at(arguments, position)?))
    };
    let mut out = Vec::new();
    if is("supportsInterface(bytes4)") {
        let asked = word_at(arguments, 0)?;
        out.extend_from_slice(&flag(supports(contract, [asked[0], asked[1], asked[2], asked[3]])));
    } else if is("name()") {
        put_text(&mut out, &contract.name);
    } else if is("symbol()") {
        put_text(&mut out, &contract.symbol);
    } else if contract.standard == Standard::Erc721 && is("ownerOf(uint256)") {
        let id = number_at(0)?;
        let owner = balances.owner(index, id).ok_or(CallError::Reverted("ERC721: invalid token ID"))?;
        out.extend_from_slice(&topic_of(book.account(owner)));
    } else if contract.standard == Standard::Erc721 && is("balanceOf(address)") {
        let account = account_at(0)?;
        if account == Some(crate::book::ZERO) {
            return Err(CallError::Reverted("ERC721: address zero is not a valid owner"));
        }
        let held = balances.of_contract(index).filter(|(_, holder, _)| Some(*holder) == account).count();
        out.extend_from_slice(&word(U256::from(held)));
    } else if contract.standard == Standard::Erc721 && is("totalSupply()") {
        out.extend_from_slice(&word(U256::from(balances.of_contract(index).count())));
    } else if contract.standard == Standard::Erc721 && is("tokenURI(uint256)") {
        let id = number_at(0)?;
        balances.owner(index, id).ok_or(CallError::Reverted("ERC721: invalid token ID"))?;
        put_text(&mut out, &token_uri(book, index, id));
    } else if contract.standard == Standard::Erc1155 && is("uri(uint256)") {
        put_text(&mut out, &token_uri(book, index, number_at(0)?));
    } else if contract.standard == Standard::Erc1155 && is("balanceOf(address,uint256)") {
        let (account, id) = (account_at(0)?, number_at(1)?);
        let held = account.map_or(U256::ZERO, |account| balances.of(index, id, account));
        out.extend_from_slice(&word(held));
    } else if contract.standard == Standard::Erc1155 && is("balanceOfBatch(address[],uint256[])") {
        let accounts = list_at(arguments, 0)?;
        let ids = list_at(arguments, 1)?;
        if accounts.len() != ids.len() {
            return Err(CallError::Reverted("ERC1155: accounts and ids length mismatch"));
        }
        out.extend_from_slice(&word(U256::from(32)));
        out.extend_from_slice(&word(U256::from(ids.len())));
        for (account, id) in accounts.iter().zip(&ids) {
            let address: [u8; 20] = account[12..].try_into().map_err(|_| CallError::BadInput)?;
            let id = U256::from_be_bytes(*id);
            let held =
                book.find_account(&address).map_or(U256::ZERO, |account| balances.of(index, id, account));
            out.extend_from_slice(&word(held));
        }
    } else if contract.standard == Standard::Erc20 && is("decimals()") {
        out.extend_from_slice(&word(U256::from(18)));
    } else {
        return Err(CallError::Reverted(""));
    }
    debug_assert!(out.len().is_multiple_of(32), "ABI values are whole words");
    Ok(out)
}

/// The revert data of a reason: `Error(string)`.
pub(crate) fn revert_data(reason: &str) -> Vec<u8> {
    if reason.is_empty() {
        return Vec::new();
    }
    let mut data = keccak256("Error(string)")[..4].to_vec();
    let mut text = Vec::new();
    put_text(&mut text, reason);
    data.extend_from_slice(&text);
    data
}

fn supports(contract: &Contract, interface: [u8; 4]) -> bool {
    let known: &[[u8; 4]] = match contract.standard {
        Standard::Erc721 => &[[0x01, 0xff, 0xc9, 0xa7], [0x80, 0xac, 0x58, 0xcd], [0x5b, 0x5e, 0x13, 0x9f]],
        Standard::Erc1155 => &[[0x01, 0xff, 0xc9, 0xa7], [0xd9, 0xb6, 0x7a, 0x26], [0x0e, 0x89, 0x34, 0x1c]],
        Standard::Erc20 => &[],
    };
    known.contains(&interface)
}

fn flag(value: bool) -> [u8; 32] {
    word(U256::from(u8::from(value)))
}

fn word_at(arguments: &[u8], position: usize) -> Result<[u8; 32], CallError> {
    let start = position.checked_mul(32).ok_or(CallError::BadInput)?;
    let bytes = arguments.get(start..start + 32).ok_or(CallError::BadInput)?;
    bytes.try_into().map_err(|_| CallError::BadInput)
}

/// The words of the dynamic array whose offset stands at `position`.
fn list_at(arguments: &[u8], position: usize) -> Result<Vec<[u8; 32]>, CallError> {
    let small = |word: [u8; 32]| usize::try_from(U256::from_be_bytes(word)).map_err(|_| CallError::BadInput);
    let offset = small(word_at(arguments, position)?)?;
    let tail = arguments.get(offset..).ok_or(CallError::BadInput)?;
    let length = small(word_at(tail, 0)?)?;
    if length > tail.len() / 32 {
        return Err(CallError::BadInput);
    }
    (1..=length).map(|at| word_at(tail, at)).collect()
}
